"""EAGLE-3 heads over pages, beside models with fused layers and with compiled passes, as on CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runner.drafting.eagles import Eagle, make_target
from tests.runner.drafting.headed import check_drafts
from tests.runner.paged.models import MAX_RUNNING, paged, with_config
from tests.support.cuda import ReferenceKernels
from tests.support.eagle_models import make_eagle
from treadle.runner.layers.compiled_module import CompiledModule
from treadle.runner.loading import candidates
from treadle.runner.loading.reference import Reference


@pytest.mark.parametrize("decoder", ["fused", "compiled"])
def test_drafts_are_those_of_a_new_head_that_sees_the_whole_row(decoder: str, tmp_path: Path) -> None:
    one = Eagle.of(make_target(tmp_path / "model", "llama"), make_eagle(tmp_path / "head"))
    target, head = one.model.target, one.model.head
    assert target.layers is not None
    reference = Reference(head.library, head.module, head.context, selection=head.library.selection(head.module))
    pages = candidates.plain_pages(reference, 1 << 20, max_running=MAX_RUNNING, kernels=ReferenceKernels)
    config = paged(target.module, pages=256)
    assert config.fused
    if decoder == "compiled":
        compiled = CompiledModule(target.module, config.selection, target.layers, ReferenceKernels.compile)
        config = replace(config, decoder=compiled, compiled=True)
    check_drafts(one, replace(one.model, target=with_config(target, config), head=with_config(head, pages)))

"""MTP heads over pages, beside models with fused layers and others, as on CUDA."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runner.drafting.headed import check_drafts, maker
from tests.runner.paged.models import MAX_RUNNING, paged, with_config
from tests.support.cuda import ReferenceKernels
from treadle.runner.loading import candidates
from treadle.runner.loading.reference import Reference


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe_lite", "mimo"])
def test_drafts_are_those_of_a_new_head_that_sees_the_whole_row(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Recurrent states, latents, and a head that takes states in front of the last norm."""
    one = maker(tmp_path_factory.mktemp("headed"))(family)
    target, head = one.model.target, one.model.head
    assert head.layers is not None
    reference = Reference(head.library, head.module, head.context, selection=head.library.selection(head.module))
    pages = candidates.plain_pages(reference, 1 << 20, max_running=MAX_RUNNING, kernels=ReferenceKernels)
    fused = paged(target.module, pages=256)
    assert fused.fused
    assert not pages.fused
    check_drafts(one, replace(one.model, target=with_config(target, fused), head=with_config(head, pages)))

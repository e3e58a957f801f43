"""Prompts with images: each image has its tokens at its place, and no text of a client becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.errors import InvalidRequest, UnsupportedParameter
from treadle.text import TextModel
from treadle.text.images import ImageSource, Layout
from treadle.text.images.prompt import ImagesNeeded, image_part
from treadle.text.templates import TemplateRefusal

from .. import builders
from .folders import GEMMA, QWEN, USER_ONLY, image_folder, image_model

CAT, DOG = (ImageSource(at=f"messages[0].content[{i}]", data=name) for i, name in enumerate(("cat", "dog")))
LAYOUTS = {CAT.key: Layout(((1, 4, 4),)), DOG.key: Layout(((1, 2, 4),))}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any, role: str = "user") -> dict[str, Any]:
    content = [image_part(part) if isinstance(part, ImageSource) else text(part) for part in parts]
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return image_model(tmp_path_factory.mktemp("qwen"))


def decoded(model: TextModel, ids: list[int]) -> str:
    return model.decode(ids, skip_special_tokens=False)


def placed(model: TextModel, turns: list[dict[str, Any]], layouts: Any = LAYOUTS, **more: Any) -> Any:
    return model.chat_prompt(turns, images=layouts, **more)


PAD = "<|image_pad|>"


def wrapped(count: int) -> str:
    return f"<|vision_start|>{PAD * count}<|vision_end|>"


def test_each_image_has_its_tokens_at_its_place(qwen: TextModel) -> None:
    prompt = placed(qwen, [user("a", CAT, "b"), {"role": "assistant", "content": "ok"}, user(DOG, CAT)])
    turns = f"a{wrapped(4)}b<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\n{wrapped(2)}{wrapped(4)}"
    assert decoded(qwen, prompt.ids) == f"<|im_start|>user\n{turns}<|im_end|>\n<|im_start|>assistant\n"
    pad = qwen.named_ids[PAD]
    assert [image.key for image in prompt.images] == [CAT.key, DOG.key, CAT.key]
    assert [prompt.ids[image.start : image.start + image.count] for image in prompt.images] == [
        [pad] * count for count in (4, 2, 4)
    ]
    assert sum(token == pad for token in prompt.ids) == 10


def test_images_without_a_layout_are_asked_for_once_each(qwen: TextModel) -> None:
    for layouts in ({}, {CAT.key: LAYOUTS[CAT.key]}):
        with pytest.raises(ImagesNeeded) as caught:
            placed(qwen, [user(CAT, DOG, CAT)], layouts)
        assert caught.value.sources == [CAT, DOG]


def test_a_clients_text_does_not_become_an_image(qwen: TextModel) -> None:
    prompt = placed(qwen, [user(f"{PAD} <|vision_start|>", CAT, PAD), {"role": "assistant", "content": PAD}])
    pad = qwen.named_ids[PAD]
    assert sum(token == pad for token in prompt.ids) == 4
    assert prompt.images[0].count == 4
    assert decoded(qwen, prompt.ids).count(PAD) == 7


def test_tokens_that_are_not_flagged_special_are_guarded_too(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", special=False)
    prompt = placed(model, [user(PAD, CAT)])
    (image,) = prompt.images
    assert [token for token in prompt.ids if token == prompt.ids[image.start]] == [prompt.ids[image.start]] * 4


def test_texts_around_an_image_are_tokenized_with_the_images_text(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", "gemma3", GEMMA, eos_token_id=1)
    prompt = placed(model, [user("a", CAT, "b")], {CAT.key: Layout()})
    view = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    assert decoded(model, prompt.ids) == f"<turn>user\na{view}b</turn>\n<turn>model\n"
    assert prompt.ids == model.encode(f"<turn>user\na{view}b</turn>\n<turn>model\n", add_special_tokens=False)
    assert prompt.images[0].count == 4


def test_marks_between_an_images_tokens_belong_to_it(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", "pixtral", QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]"))
    prompt = placed(model, [user(CAT)], {CAT.key: Layout(((8, 12),))})
    (image,) = prompt.images
    inside = prompt.ids[image.start : image.start + image.count]
    assert decoded(model, inside) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG]"


@pytest.mark.parametrize("template", [builders.CHATML, USER_ONLY])
def test_a_template_without_a_place_for_an_image_gets_one(tmp_path: Path, template: str) -> None:
    model = image_model(tmp_path / "m", template=template)
    image = PAD * 4 if template == builders.CHATML else wrapped(4)
    prompt = placed(model, [user("a"), user("b", CAT, "c", role="tool")])
    assert f"b{image}c" in decoded(model, prompt.ids)
    assert prompt.images[0].count == 4


def test_images_in_turns_that_are_joined_stay_at_their_place(tmp_path: Path) -> None:
    alternating = (
        "{%- if messages[1] is defined and messages[1].role == 'user' -%}{{ raise_exception('no') }}{%- endif -%}"
    )
    model = image_model(tmp_path / "m", template=alternating + QWEN)
    prompt = placed(model, [user("a", CAT), {"role": "user", "content": "b"}, user(DOG, "c")])
    assert f"a{wrapped(4)}\n\nb\n\n{wrapped(2)}c" in decoded(model, prompt.ids)
    assert [image.key for image in prompt.images] == [CAT.key, DOG.key]


def test_a_result_that_becomes_text_keeps_its_image(tmp_path: Path) -> None:
    no_tools = (
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no') }}{%- endif -%}{%- endfor -%}"
    )
    model = image_model(tmp_path / "m", template=no_tools + QWEN)
    prompt = placed(model, [user("a"), {"role": "assistant", "content": "x"}, user("b", CAT, role="tool")])
    assert f"<tool_response>\nb{wrapped(4)}\n</tool_response>" in decoded(model, prompt.ids)


def test_the_last_turn_can_be_continued_with_images_before_it(qwen: TextModel) -> None:
    turns = [user(CAT), {"role": "assistant", "content": "It is"}]
    prompt = placed(qwen, turns, continue_final_message=True)
    assert decoded(qwen, prompt.ids).endswith("It is")
    assert prompt.images[0].count == 4
    prompt = placed(qwen, [user("Look at ", CAT)], continue_final_message=True)
    assert decoded(qwen, prompt.ids).endswith(wrapped(4))


def test_a_template_that_writes_images_twice_is_refused(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", template=QWEN + QWEN)
    with pytest.raises(TemplateRefusal, match="does not write these images"):
        placed(model, [user(CAT)])


def test_tokens_that_a_template_adds_are_not_taken_for_the_clients_image(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", "gemma3", GEMMA + "<image_soft_token>")
    with pytest.raises(InvalidRequest, match="can't be told from the model's own"):
        placed(model, [user(CAT)], {CAT.key: Layout()})


def test_a_model_that_reads_text_names_the_image_and_the_reason(tmp_path: Path) -> None:
    model = image_model(tmp_path / "m", vision_config=None)
    with pytest.raises(
        UnsupportedParameter, match=r"content\[0\] is an image, and the model reads text only"
    ) as caught:
        placed(model, [user(CAT)])
    assert caught.value.param == CAT.at


def test_the_text_view_has_the_settings(tmp_path: Path) -> None:
    from treadle.text.packed_view import pack, unpack

    model = image_model(tmp_path / "m")
    assert unpack(pack(model)).images == model.images
    bare = TextModel.load(image_folder(tmp_path / "n", model_type="other"))
    assert unpack(pack(bare)).no_images == bare.no_images == "images of models of type 'other' are not served"


def test_keys_tell_images_apart_by_all_that_changes_them() -> None:
    sources = [
        CAT,
        DOG,
        ImageSource(at="", data="cat", low=True),
        ImageSource(at="", url="cat"),
        ImageSource(at="", data="cat", media_type="image/png"),
    ]
    assert len({source.key for source in sources}) == len(sources)
    assert ImageSource(at="elsewhere", data="cat").key == CAT.key

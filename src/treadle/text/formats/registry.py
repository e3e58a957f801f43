"""Registry of the tool-call formats, by name, and the choice of one from a chat template."""

from __future__ import annotations

from ...errors import ConfigError
from .base import ToolFormat
from .command_r import CommandR
from .deepseek import DeepSeekV3, DeepSeekV31
from .gemma3 import Gemma3, Gemma3Pythonic, Gemma3ToolCode
from .gemma4 import FunctionGemma, Gemma4
from .glm import Glm, Glm47
from .granite import Granite
from .harmony import Harmony
from .hermes import Hermes
from .kimi_k2 import KimiK2
from .lfm2 import Lfm2
from .llama import LlamaJson, LlamaPythonic
from .minimax import DeepSeekV32, MiniMax
from .mistral import Mistral, MistralArray
from .olmo3 import Olmo3
from .phi4_mini import Phi4Mini, Phi4MiniFunctools
from .qwen3_coder import Qwen3Coder, SeedOss
from .tagged_lists import Hunyuan, Nemotron

_FORMATS: tuple[ToolFormat, ...] = (
    Harmony(),
    *(DeepSeekV3(), DeepSeekV31(), DeepSeekV32()),
    *(Gemma4(), FunctionGemma(), Gemma3ToolCode(), Gemma3Pythonic(), Gemma3()),
    *(Glm(), Glm47()),
    CommandR(),
    Granite(),
    KimiK2(),
    Lfm2(),
    MiniMax(),
    *(Mistral(), MistralArray()),
    *(Nemotron(), Hunyuan()),
    Olmo3(),
    *(Phi4MiniFunctools(), Phi4Mini()),
    *(SeedOss(), Qwen3Coder()),
    Hermes(),
    *(LlamaJson(), LlamaPythonic()),
)
"""In the order in which a template is compared with them: the most particular first."""

FORMATS: dict[str, ToolFormat] = {tool_format.name: tool_format for tool_format in _FORMATS}


def find(name: str) -> ToolFormat:
    """Return the format of this name. Raises ConfigError for an unknown one."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"tool parser {name!r} is unknown; there are {', '.join(sorted(FORMATS))}") from None


def pick(template: str) -> str | None:
    """Return the name of the format that a chat template asks a model to write; None if it is none of them."""
    return next((tool_format.name for tool_format in _FORMATS if tool_format.detect(template)), None)

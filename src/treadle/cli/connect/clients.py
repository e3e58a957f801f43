"""The clients that `treadle connect` knows: where each keeps its settings, and what it needs in them.

No setup changes a client's defaults: it adds a provider or a model named Treadle beside those that are there, or a file
that the client reads on demand. Formats are those of the versions in docs/compatibility.md.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ...environment import KEY_VARIABLE
from .server import Server
from .settings import Client, Edit, JsonFile, OwnFile, Setup, YamlFile

NAME = "treadle"
TITLE = "Treadle"


def _folder(default: str, *variables: str) -> Path:
    """Return the folder that the first set variable names, else `default` below the home folder."""
    given = next((value for name in variables if (value := os.environ.get(name))), "")
    return Path(given) if given else Path.home() / default


def _config(name: str) -> Path:
    """Return a folder below XDG_CONFIG_HOME, as programs have it on Linux and many on macOS too."""
    return _folder(".config", "XDG_CONFIG_HOME") / name


def _shown(path: Path) -> str:
    """Return a path for a command line."""
    home = Path.home()
    return f"~/{shlex.quote(str(path.relative_to(home)))}" if path.is_relative_to(home) else shlex.quote(str(path))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _known(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _claude(server: Server) -> Setup:
    path = _folder(".claude", "CLAUDE_CONFIG_DIR") / f"{NAME}.json"
    limits = _known(CLAUDE_CODE_AUTO_COMPACT_WINDOW=server.context, CLAUDE_CODE_MAX_OUTPUT_TOKENS=server.output)
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        **{name: str(value) for name, value in limits.items()},
        # The header names the request, and so changes the beginning of every prompt: nothing behind it could be cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    settings: dict[str, Any] = {"env": variables}
    if server.needs_key and server.written_key is None:
        settings["apiKeyHelper"] = f"printenv {KEY_VARIABLE}"
    else:
        variables["ANTHROPIC_AUTH_TOKEN"] = server.key_as("")
    return Setup((OwnFile(path, _json(settings)),), start=f"claude --settings {_shown(path)}")


def _codex(server: Server) -> Setup:
    path = _folder(".codex", "CODEX_HOME") / f"{NAME}.config.toml"
    top = {"model": server.model, "model_provider": NAME, **_known(model_context_window=server.context)}
    provider = {"name": TITLE, "base_url": server.openai_url, "wire_api": "responses"}
    if server.written_key is not None:
        provider["experimental_bearer_token"] = server.written_key
    elif server.needs_key:
        provider["env_key"] = KEY_VARIABLE
    text = f"{_toml(top)}\n[model_providers.{NAME}]\n{_toml(provider)}"
    return Setup((OwnFile(path, text),), start=f"codex --profile {NAME}")


def _toml(values: dict[str, Any]) -> str:
    """Return strings and integers as lines of TOML, whose strings are written as JSON's."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def _opencode(server: Server) -> Setup:
    folder = _config("opencode")
    names = ("opencode.jsonc", "opencode.json", "config.json")
    path = next((folder / name for name in names if (folder / name).exists()), folder / "opencode.json")
    model: dict[str, Any] = {"name": f"{server.model} ({TITLE})"}
    if server.context is not None:
        model["limit"] = {"context": server.context, "output": server.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": TITLE,
        "options": {"baseURL": server.openai_url, "apiKey": server.key_as(f"{{env:{KEY_VARIABLE}}}")},
        "models": {server.model: model},
    }
    edits = (Edit(("provider", NAME), provider),)
    return Setup((JsonFile(path, edits),), start=f"opencode --model {shlex.quote(f'{NAME}/{server.model}')}")


def _qwen(server: Server) -> Setup:
    path = _folder(".qwen", "QWEN_HOME") / "settings.json"
    limits = _known(
        contextWindowSize=server.context,
        samplingParams=_known(max_tokens=server.output) or None,
    )
    model = {
        "id": server.model,
        "name": TITLE,
        "baseUrl": server.openai_url,
        "envKey": KEY_VARIABLE,
        **_known(generationConfig=limits or None),
    }
    edits = [Edit(("modelProviders", "openai"), model, item="name")]
    if server.written_key is not None or not server.needs_key:
        edits.append(Edit(("env", KEY_VARIABLE), server.key_as("")))
    return Setup((JsonFile(path, tuple(edits)),), start=f"qwen --auth-type openai --model {shlex.quote(server.model)}")


def _crush(server: Server) -> Setup:
    provider = {
        "name": TITLE,
        "type": "openai-compat",
        "base_url": server.openai_url,
        "api_key": server.key_as(f"${KEY_VARIABLE}"),
    }
    limits = _known(context_window=server.context, default_max_tokens=server.output)
    edits = (
        Edit(("providers", NAME), provider),
        Edit(("providers", NAME, "models"), {"id": server.model, "name": server.model, **limits}, item="id"),
    )
    path = _config("crush") / "crush.json"
    return Setup((JsonFile(path, edits),), start="crush", notes=(f"Choose {TITLE}'s model in Crush.",))


def _goose(server: Server) -> Setup:
    provider = {
        "name": NAME,
        "engine": "openai",
        "display_name": TITLE,
        "description": f"{server.model} at {server.url}",
        "api_key_env": KEY_VARIABLE if server.needs_key else "",
        "base_url": f"{server.openai_url}/chat/completions",
        "models": [{"name": server.model, **_known(context_limit=server.context)}],
        "supports_streaming": True,
        "requires_auth": server.needs_key,
    }
    if server.written_key is not None:
        provider |= {"api_key_env": "", "requires_auth": False}
        provider["headers"] = {"Authorization": f"Bearer {server.written_key}"}
    path = _config("goose") / "custom_providers" / f"{NAME}.json"
    variables = {"GOOSE_PROVIDER": NAME, "GOOSE_MODEL": server.model}
    return Setup((OwnFile(path, _json(provider)),), variables, start="goose session")


def _zed(server: Server) -> Setup:
    provider = ("language_models", "openai_compatible", NAME)
    model = {
        "name": server.model,
        "display_name": f"{server.model} ({TITLE})",
        **_known(max_tokens=server.context or _ZED_CONTEXT, max_output_tokens=server.output),
        "capabilities": {
            "tools": True,
            "images": server.images,
            "parallel_tool_calls": True,
            "prompt_cache_key": False,
        },
    }
    edits = (
        Edit(provider, {"api_url": server.openai_url}),
        Edit((*provider, "available_models"), model, item="name"),
    )
    notes = [f"Choose {TITLE}'s model in the agent panel."]
    if server.written_key is not None:
        notes.append("Zed reads no key from its settings file: enter it in the settings of its agent panel instead.")
    elif not sys.platform.startswith("darwin"):
        notes.append(f"Zed takes the key from {KEY_VARIABLE} when it is started from a terminal with it.")
    else:
        notes.append(f"Enter the key in the agent panel's settings, or start Zed from a terminal with {KEY_VARIABLE}.")
    key = {} if server.needs_key else {KEY_VARIABLE: "none"}
    return Setup((JsonFile(_config("zed") / "settings.json", edits),), key, start="zed .", notes=tuple(notes))


_ZED_CONTEXT = 32_768
"""Context in tokens where the server's is not known: Zed's settings need a number."""


def _continue(server: Server) -> Setup:
    model: dict[str, Any] = {
        "name": TITLE,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai_url,
        "apiKey": server.key_as(f"${{{{ secrets.{KEY_VARIABLE} }}}}"),
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
    }
    if server.context is not None:
        model["defaultCompletionOptions"] = {"contextLength": server.context, "maxTokens": server.output}
    path = _folder(".continue", "CONTINUE_GLOBAL_DIR") / "config.yaml"
    head = "name: Local assistant\nversion: 1.0.0\nschema: v1\n"
    secret = f"Continue reads {KEY_VARIABLE} from {_shown(path.parent / '.env')}, and its CLI from the environment."
    notes = (f"Choose {TITLE} in Continue's list of models.", *([secret] if server.needs_key else []))
    return Setup((YamlFile(path, Edit(("models",), model, item="name"), head),), start="cn", notes=notes)


def _llm(server: Server) -> Setup:
    default = "Library/Application Support" if sys.platform == "darwin" else ".config"
    folder = _folder(default, "XDG_CONFIG_HOME") if sys.platform != "darwin" else Path.home() / default
    given = os.environ.get("LLM_USER_PATH")
    path = (Path(given) if given else folder / "io.datasette.llm") / "extra-openai-models.yaml"
    model: dict[str, Any] = {
        "model_id": NAME,
        "model_name": server.model,
        "api_base": server.openai_url,
        "can_stream": True,
        "supports_tools": True,
        "supports_schema": True,
    }
    notes: tuple[str, ...] = ()
    if server.needs_key:
        model["api_key_name"] = NAME
        notes = (f'Give llm the key, once: llm keys set {NAME} --value "${KEY_VARIABLE}"',)
    return Setup((YamlFile(path, Edit((), model, item="model_id")),), start=f"llm --model {NAME} 'Hello'", notes=notes)


def _aider(server: Server) -> Setup:
    name = f"openai/{server.model}"
    metadata = Path.home() / f".aider.{NAME}.metadata.json"
    settings = Path.home() / f".aider.{NAME}.conf.yml"
    limits = _known(max_input_tokens=server.context, max_output_tokens=server.output, max_tokens=server.output)
    values = {"model": name, "weak-model": name, "openai-api-base": server.openai_url}
    if not server.needs_key or server.written_key is not None:
        values["openai-api-key"] = server.key_as("")
    files = [OwnFile(settings, "")]
    if limits:
        prices = {"input_cost_per_token": 0, "output_cost_per_token": 0}
        card = {**limits, **prices, "litellm_provider": "openai", "mode": "chat"}
        values["model-metadata-file"] = str(metadata)
        files.append(OwnFile(metadata, _json({name: card})))
    files[0] = OwnFile(settings, "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    key = {"AIDER_OPENAI_API_KEY": f'"${KEY_VARIABLE}"'} if server.needs_key and server.written_key is None else {}
    return Setup(tuple(files), key, start=f"aider --config {_shown(settings)}")


def _copilot(server: Server) -> Setup:
    prompt = None if server.context is None else server.context - (server.output or 0)
    limits = _known(COPILOT_PROVIDER_MAX_PROMPT_TOKENS=prompt, COPILOT_PROVIDER_MAX_OUTPUT_TOKENS=server.output)
    variables = {
        "COPILOT_PROVIDER_BASE_URL": server.openai_url,
        "COPILOT_MODEL": shlex.quote(server.model),
        **{name: str(value) for name, value in limits.items()},
        "COPILOT_OFFLINE": "true",
    }
    if server.needs_key:
        variables["COPILOT_PROVIDER_API_KEY"] = server.key_as(f'"${KEY_VARIABLE}"')
    return Setup(variables=variables, start="copilot")


def _openwebui(server: Server) -> Setup:
    key = server.key_as(f'"${KEY_VARIABLE}"')
    variables = {"OPENAI_API_BASE_URL": server.openai_url, "OPENAI_API_KEY": key, "ENABLE_OLLAMA_API": "False"}
    notes = (
        "Open WebUI keeps the first values in its database. Later: Admin Settings, Connections, OpenAI, Add "
        f"Connection, with the URL {server.openai_url} and a key.",
        f"In a container the URL is {_in_container(server.openai_url)}.",
    )
    return Setup(variables=variables, start="open-webui serve", notes=notes)


def _in_container(url: str) -> str:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        url = url.replace(f"//{host}:", "//host.docker.internal:")
    return url


CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        Client("claude", "Claude Code", _claude, ("claude",), (".claude",), 20_000),
        Client("codex", "Codex", _codex, ("codex",), (".codex",), 10_000),
        Client("opencode", "OpenCode", _opencode, ("opencode",), (".config/opencode",), 8_000),
        Client("qwen", "Qwen Code", _qwen, ("qwen",), (".qwen",), 20_000),
        Client("crush", "Crush", _crush, ("crush",), (".config/crush",), 8_000),
        Client("goose", "Goose", _goose, ("goose",), (".config/goose",), 8_000),
        Client("copilot", "GitHub Copilot CLI", _copilot, ("copilot",), (".copilot",), 12_000),
        Client("aider", "aider", _aider, ("aider",), (), 5_000),
        Client("zed", "Zed", _zed, ("zed", "zeditor"), (".config/zed", "/Applications/Zed.app"), 8_000),
        Client("continue", "Continue", _continue, ("cn",), (".continue",), 2_000),
        Client("openwebui", "Open WebUI", _openwebui, ("open-webui",)),
        Client("llm", "llm", _llm, ("llm",)),
    )
}
"""Clients by name. Their prompt tokens are a quarter of the characters of a first prompt in docs/compatibility.md;
aider adds a map of the repository. Crush, Goose and Zed were not measured, and count as OpenCode."""

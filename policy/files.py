"""The one room of ``policy`` that reads files.

``read_document`` and ``decode`` turn a YAML file into a validated struct, with errors that name
the file, the key, the value and a near-by name; the loaders below them say where things lie.
"""

from __future__ import annotations

import difflib
import math
import re
from decimal import Decimal
from functools import cache
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

import msgspec
import yaml

from policy.cost import SCHEMA, Gpu, ModelShape, Profile, scale_profile
from policy.parameters import Parameters
from policy.parameters.chains import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T")

_PATH_IN_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")
_PATH_STEP = re.compile(r"\.(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]")
_DURATION = re.compile(r"^(?P<number>\d+(\.\d+)?) ?(?P<unit>ms|s|m|h)$")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_TENSOR_PARALLEL = re.compile(r"^(?P<name>[^@]+)@tp(?P<size>[1-9]\d*)$")


class FileError(ValueError):
    """A file that cannot be used: where, which key, what stands there, what to do about it."""

    def __init__(
        self, where: str, message: str, *, key: str = "", value: object = None, hint: str = ""
    ) -> None:
        self.where = where
        self.key = key
        self.value = value
        self.hint = hint
        at_key = f": {key}" if key else ""
        text = f"{where}{at_key}: {message}"
        super().__init__(f"{text} (hint: {hint})" if hint else text)


def read_document(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. A key written twice is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(str(path), f"is no valid YAML: {error}") from error
    return parse_document(text, str(path))


def parse_document(text: str, where: str) -> dict[str, Any]:
    """A YAML text's mapping; ``where`` is what errors call it."""
    try:
        raw: object = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise FileError(where, f"is no valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise FileError(where, "a mapping is expected", value=raw)
    return cast("dict[str, Any]", raw)


def decode(raw: Mapping[str, Any], kind: type[T], where: str, *, schema: int | None = SCHEMA) -> T:
    """The mapping as a validated ``kind``; ``schema`` is the number it must carry."""
    if schema is not None and raw.get("schema") != schema:
        raise FileError(
            where,
            f"schema {raw.get('schema')!r} is not known",
            key="schema",
            value=raw.get("schema"),
            hint=f"this version reads schema: {schema}",
        )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, raw, kind, where) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names what was perhaps meant, or what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return "did you mean " + ", ".join(close) + "?" if close else "known: " + ", ".join(names)


def policy_names() -> tuple[str, ...]:
    """Names of the policies that are shipped."""
    return tuple(sorted(path.stem for path in _presets_root().glob("*.yaml")))


def load_policy(name_or_path: str | Path) -> Parameters:
    """A shipped policy by its name, or a policy file."""
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    elif name in policy_names():
        path = _presets_root() / f"{name}.yaml"
    else:
        raise FileError(name, "no such policy", value=name, hint=nearest(name, policy_names()))
    return decode(_plain_chains(read_document(path), str(path)), Parameters, str(path))


def parse_policy(text: str, source: str) -> Parameters:
    """A policy file's text; ``source`` is what errors call it."""
    return decode(_plain_chains(parse_document(text, source), source), Parameters, source)


def load_chain(path: str | Path) -> Plan:
    """A chain's definition in a file of its own: ``chain_timeout`` (or ``budget_ms``) and
    ``steps``, as a plan in a policy file has them."""
    where = str(path)
    raw = read_document(Path(path))
    for key in raw:
        if key not in _CHAIN_KEYS:
            raise FileError(where, "unknown key", key=str(key), hint=nearest(str(key), _CHAIN_KEYS))
    return decode(_plain_plan(raw, where, ""), Plan, where, schema=None)


@cache
def code_hash() -> str:
    """Of the sources that decide, so that a log tells which code it was made with."""
    root = Path(str(resources.files("policy")))
    digest = blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that are shipped (others of the same card are scaled from these)."""
    root = _profiles_root()
    return tuple(
        sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml"))
    )


@cache
def load_models() -> Mapping[str, ModelShape]:
    """Model shapes by name."""
    return _load_table(_profiles_root() / "models.yaml", "models", ModelShape)


@cache
def load_gpus() -> Mapping[str, Gpu]:
    """Cards by name."""
    return _load_table(_profiles_root() / "gpus.yaml", "gpus", Gpu)


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile, a profile file, or ``CARD/MODEL[@tpN]`` scaled from the nearest one."""
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith((".yaml", ".yml")):
        return _load_profile_file(Path(name_or_path), expected_name=None)
    name = name.removesuffix("@tp1")
    if name in profile_names():
        return _load_profile_file(_profiles_root() / f"{name}.yaml", expected_name=name)
    return _scale_to(name)


def _load_profile_file(path: Path, expected_name: str | None) -> Profile:
    profile = decode(read_document(path), Profile, str(path))
    if expected_name is not None and profile.name != expected_name:
        raise FileError(str(path), f"should be {expected_name}", key="name", value=profile.name)
    if profile.gpu not in load_gpus():
        hint = nearest(profile.gpu, load_gpus())
        raise FileError(str(path), f"unknown card {profile.gpu!r}", key="gpu", hint=hint)
    if profile.model not in load_models():
        hint = nearest(profile.model, load_models())
        raise FileError(str(path), f"unknown model {profile.model!r}", key="model", hint=hint)
    return profile


def _scale_to(name: str) -> Profile:
    match = _TENSOR_PARALLEL.match(name)
    bare, size = (match["name"], int(match["size"])) if match else (name, 1)
    card, _, model_name = bare.partition("/")
    gpus, models = load_gpus(), load_models()
    bases = [load_profile(base) for base in profile_names() if base.startswith(f"{card}/")]
    fitted = [base for base in bases if base.trust.status == "fitted"]
    if card not in gpus or model_name not in models or not fitted:
        known = {*profile_names(), *(f"{base.gpu}/{model}" for base in fitted for model in models)}
        raise FileError(name, "no such profile", value=name, hint=nearest(bare, known))
    model = models[model_name]

    def distance(base: Profile) -> tuple[bool, float, str]:
        shape = models[base.model]
        ratio = shape.total_parameters / model.total_parameters
        return (shape.qk_norm != model.qk_norm, max(ratio, 1 / ratio), base.name)

    base = min(fitted, key=distance)
    try:
        scaled = scale_profile(base, models[base.model], model, gpus[card], size)
    except ValueError as error:
        raise FileError(name, str(error), value=name) from error
    raw = cast("dict[str, Any]", msgspec.to_builtins(scaled))
    return decode(raw, Profile, name)


_CHAIN_KEYS = ("budget_ms", "chain_timeout", "steps")


def _plain_chains(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A policy file, its chains' durations and decimals as the parameters have them. What is
    otherwise wrong is left for ``decode`` to refuse."""
    chains: object = raw.get("chains")
    if not isinstance(chains, dict):
        return raw
    plain = dict(cast("dict[str, Any]", chains))
    plans: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if isinstance(plain.get("default"), dict):
        given = cast("dict[str, Any]", plain["default"])
        plain["default"] = _plain_plan(given, where, "chains.default.")
        plans.append((given, plain["default"]))
    if isinstance(plain.get("lines"), dict):
        lines = plain["lines"] = dict(cast("dict[str, object]", plain["lines"]))
        for line, plan in lines.items():
            if isinstance(plan, dict):
                given = cast("dict[str, Any]", plan)
                lines[line] = made = _plain_plan(given, where, f"chains.lines.{line}.")
                plans.append((given, made))
    if "step_weight" not in plain:
        # A step that is in no plan weighs as much as the others do: as the first plan's mean.
        for given, plan in plans:
            if plan.get("steps") and _has_decimals(given):
                weights = [int(step["weight"]) for step in plan["steps"]]
                plain["step_weight"] = max(1, sum(weights) // len(weights))
                break
    return raw | {"chains": plain}


def _plain_plan(raw: dict[str, Any], where: str, at: str) -> dict[str, Any]:
    """A plan with ``budget_ms`` for ``chain_timeout``; where a weight is a decimal, all of them are
    in thousandths."""
    plain = dict(raw)
    if "chain_timeout" in plain:
        if "budget_ms" in plain:
            raise FileError(
                where, "budget_ms says the same", key=f"{at}chain_timeout", hint="leave one out"
            )
        given: object = plain.pop("chain_timeout")
        plain["budget_ms"] = _duration_ms(given, where, f"{at}chain_timeout")
    if _has_decimals(raw):
        plain["steps"] = [
            {**step, "weight": _thousandths(step.get("weight", 1), where, f"{at}steps[{n}].weight")}
            for n, step in enumerate(cast("list[dict[str, Any]]", raw["steps"]))
        ]
    return plain


def _has_decimals(plan: dict[str, Any]) -> bool:
    steps: object = plan.get("steps")
    if not isinstance(steps, list):
        return False
    each = cast("list[object]", steps)
    if not all(isinstance(step, dict) for step in each):
        return False
    return any(isinstance(cast("dict[str, Any]", step).get("weight"), float) for step in each)


def _thousandths(weight: object, where: str, key: str) -> int:
    number = weight if isinstance(weight, (int, float)) and not isinstance(weight, bool) else -1
    if not (math.isfinite(number) and round(number * 1000) >= 1):
        hint = "a number such as 0.2; steps share what is left by their weights"
        message = f"a weight is at least 0.001, got {weight!r}"
        raise FileError(where, message, key=key, value=weight, hint=hint)
    return round(number * 1000)


def _duration_ms(given: object, where: str, key: str) -> int:
    match = _DURATION.match(given.strip()) if isinstance(given, str) else None
    ms = Decimal(match["number"]) * _UNITS_MS[match["unit"]] if match is not None else 0
    if ms < 1 or ms != int(ms):
        hint = "a number and its unit, such as 8s, 800ms or 2m"
        raise FileError(where, f"no duration: {given!r}", key=key, value=given, hint=hint)
    return int(ms)


def _load_table(path: Path, section: str, kind: type[T]) -> Mapping[str, T]:
    raw = read_document(path)
    where = str(path)
    if raw.get("schema") != SCHEMA or set(raw) != {"schema", section}:
        hint = f"schema: {SCHEMA} and {section}: are expected"
        raise FileError(where, f"unexpected keys {sorted(raw)}", key=section, hint=hint)
    rows = cast("dict[str, dict[str, Any]]", raw[section])
    return MappingProxyType(
        {
            name: decode({"name": name, **row}, kind, f"{where}: {name}", schema=None)
            for name, row in rows.items()
        }
    )


def _presets_root() -> Path:
    return Path(str(resources.files("policy"))) / "presets"


def _profiles_root() -> Path:
    return Path(str(resources.files("policy"))) / "profiles"


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if isinstance(key_node, yaml.ScalarNode):
                key = str(cast("object", key_node.value))
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))


def _explain(
    error: msgspec.ValidationError, raw: Mapping[str, Any], kind: type[Any], where: str
) -> FileError:
    """msgspec's message names the place; add the value that stands there and a hint."""
    match = _PATH_IN_MESSAGE.match(str(error))
    assert match is not None
    what, path = match["what"], match["path"] or "$"
    key = path.removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN_FIELD.search(what)
    if unknown is not None:
        name = unknown["name"]
        key = f"{key}.{name}" if key else name
        hint = nearest(name, _fields_at(kind, path))
        return FileError(where, "unknown key", key=key, hint=hint)
    value = _value_at(raw, path)
    plain = value is None or isinstance(value, (str, int, float))
    shown = f", got {value!r}" if plain and repr(value) not in what else ""
    return FileError(where, f"{what}{shown}", key=key, value=value)


def _value_at(raw: object, path: str) -> object:
    for step in _PATH_STEP.finditer(path):
        try:
            at = cast("Any", raw)
            raw = at[step["key"]] if step["key"] is not None else at[int(step["index"])]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def _fields_at(kind: object, path: str) -> tuple[str, ...]:
    """Names of the fields that the struct at ``path`` inside ``kind`` has."""
    for step in _PATH_STEP.finditer(path):
        if step["key"] is None:  # an item of a sequence has the sequence's struct
            continue
        struct = _struct_in(kind)
        if struct is None:
            return ()
        kind = get_type_hints(struct).get(step["key"])
    struct = _struct_in(kind)
    return () if struct is None else tuple(struct.__struct_fields__)


def _struct_in(kind: object) -> type[msgspec.Struct] | None:
    """The struct inside an optional, annotated or sequence type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    for inner in get_args(kind):
        found = _struct_in(inner)
        if found is not None:
            return found
    return None

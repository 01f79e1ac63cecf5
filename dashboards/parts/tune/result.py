"""What a tuning has found: while it runs, and at its end."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards import state
from dashboards.parts.charts import show_chart
from dashboards.parts.tune.charts import importance_chart, trials_chart
from dashboards.shelf import label
from dashboards.state import said, t
from dashboards.work.tune import PROGRESS, RESULT, SPACE

if TYPE_CHECKING:
    from dashboards.jobs import Job

IMPORTANCE_LEAST = 20


def partial(job: Job) -> None:
    """The front as it grows."""
    progress = read(job, PROGRESS)
    if progress is None or not progress.get("trials"):
        return
    with st.container(key="tune_so_far"):
        _numbers(progress)
        show_chart(trials_chart(progress), f"tune_growing_{job.id}")


def result(job: Job) -> str:
    """Draw it. Gives the name of the policy that was chosen of it, by which it can be validated."""
    progress, page, verdict = read(job, PROGRESS), read(job, RESULT), read(job, "result.json")
    if progress is None or page is None or verdict is None:
        st.error(t("tune.gone"))
        return ""
    with st.container(key="tune_result"):
        _verdict(verdict)
        _numbers(progress)
        left, right = st.columns([3, 2], gap="medium")
        with left:
            show_chart(trials_chart(progress), f"tune_front_{job.id}")
        with right:
            shares = (read(job, "importance.json") or {}).get("importance", {})
            st.markdown(t("tune.importance"), help=t("tune.importance_help"))
            if shares:
                show_chart(importance_chart(shares), f"tune_matters_{job.id}", legend=False)
            else:
                st.caption(t("tune.no_importance", least=IMPORTANCE_LEAST))
        _held_out(verdict)
        _front(page)
        chosen = _chosen(job, page)
        _diff(job, chosen)
    return _kept(job.id, chosen, str(job.folder), label(job.request["policy"]))


def command(request: dict[str, Any]) -> str:
    """What does the same in a terminal, with the downloaded space file."""
    path_of = state.shelf().path_of
    words = ["twinkeel", "tune", SPACE, "--trace", str(path_of(request["trace"]))]
    words += ["--policy", str(path_of(request["policy"]))]
    for name, count in request["fleet"]:
        words += ["--profile", name, "--replicas", str(count)]
    for name in request["held_out"]:
        words += ["--held-out", str(path_of(name))]
    for option in ("trials", "seeds", "held_seeds", "slo", "seed", "jobs"):
        words += [f"--{option.replace('_', '-')}", str(request[option])]
    for option, usual in (("speed", 1), ("scale", 1), ("scale_lengths", 1), ("assume_output", 0)):
        if request[option] != usual:
            words += [f"--{option.replace('_', '-')}", f"{request[option]:g}"]
    return shlex.join(words)


def described(job: Job) -> str:
    """A tuning in a line, to choose it by."""
    began = datetime.fromtimestamp(job.began_s, UTC).astimezone()
    at = began.strftime("%d.%m. %H:%M") if job.began_s else "-"
    asked = job.request
    return t(
        "tune.recent_line", at=at, parent=label(asked["policy"]), trace=label(asked["trace"]),
        trials=asked["trials"], keys=len(asked["space"]["space"]),
        state=t(f"tune.state.{job.state}"),
    )  # fmt: skip


def read(job: Job, name: str) -> dict[str, Any] | None:
    """A file of its results; None: not there yet."""
    path = job.folder / name
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(str(path), stamp)


@st.cache_data(max_entries=200, show_spinner=False)
def _read(path: str, stamp: int) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes())
    return found


def _numbers(progress: dict[str, Any]) -> None:
    """How far it is, and what the front has over the parent."""
    trials = {one["n"]: one for one in progress["trials"]}
    own = trials.get(progress["parent"])
    front = [trials[n] for n in progress["front"] if n in trials]
    columns = st.columns(1 + progress["objectives"])
    columns[0].metric(
        t("tune.played"), f"{progress['done']} / {progress['of']}",
        t("tune.stopped", n=progress["stopped"]), delta_color="off", delta_arrow="off",
    )  # fmt: skip
    for place in range(progress["objectives"]):
        figure = progress["figures"][place]
        values = [one["values"][place] for one in front if one["values"][place] is not None]
        if not values:
            continue
        best = max(values) if figure["better"] > 0 else min(values)
        before = own["values"][place] if own else None
        change = None if before is None else f"{best - before:+.3g} {figure['unit']}".strip()
        columns[1 + place].metric(
            t("tune.best_of", name=figure["name"]), f"{best:.4g} {figure['unit']}".strip(), change,
            delta_color="normal" if figure["better"] > 0 else "inverse",
            help=t("tune.best_of_help"),
        )  # fmt: skip


def _verdict(verdict: dict[str, Any]) -> None:
    if verdict["better"]:
        st.success(t("tune.better"), icon=":material/check_circle:")
    elif verdict["changes"]:
        st.warning(t("tune.not_better"), icon=":material/help:")
    else:
        st.info(t("tune.parent_stays"), icon=":material/info:")
    st.caption(said(verdict["why"]))


def _held_out(verdict: dict[str, Any]) -> None:
    if "figures" not in verdict:
        return
    st.markdown(t("tune.held_title"), help=t("tune.held_title_help"))
    seeds = len(verdict["seeds"])
    st.caption(t("tune.held_what", what="; ".join(verdict["held_out"]), seeds=seeds))
    rows = [
        {
            t("tune.figure"): name,
            t("tune.of_parent"): _shown(one["parent"]),
            t("tune.of_tuned"): _shown(one["tuned"]),
            t("tune.gain"): _signed(one["gain"]),
            t("tune.interval"): f"{_signed(one['gain_low'])} … {_signed(one['gain_high'])}",
            t("tune.percent"): _signed(one["gain_percent"]),
        }
        for name, one in verdict["figures"].items()
    ]  # fmt: skip
    st.dataframe(rows, hide_index=True, width="stretch", key="tune_held")
    for broken in verdict["constraints_broken"]:
        st.error(t("tune.broken", what=broken))


def _front(page: dict[str, Any]) -> None:
    st.markdown(t("tune.front_title"), help=t("tune.front_help"))
    rows = [
        {
            t("tune.trial"): row["trial"],
            t("tune.role"): ", ".join(t(f"tune.is.{role}") for role in row["role"].split(", ")),
            t("tune.seeds"): row["seeds"],
            **{key: value if isinstance(value, bool) else _shown(value)
               for key, value in row.items() if key not in ("trial", "role", "seeds")},
        }
        for row in page["front"]
    ]  # fmt: skip
    st.dataframe(rows, hide_index=True, width="stretch", key="tune_front")


def _chosen(job: Job, page: dict[str, Any]) -> int:
    """The trial that is looked at: the best, unless another is chosen."""
    front = [row["trial"] for row in page["front"] if "front" in row["role"]]
    numbers = list(dict.fromkeys([page["best"], *front]))
    if len(numbers) == 1:
        return int(numbers[0])
    chosen: int = st.selectbox(
        t("tune.which"), numbers, key=f"tune_which_{job.id}", help=t("tune.which_help"),
        format_func=lambda n: f"{n} ({t('tune.is.best')})" if n == page["best"] else str(n),
    )  # fmt: skip
    return chosen


def _diff(job: Job, chosen: int) -> None:
    from twin.tune.edit import diff

    text, parent = _policy(str(job.folder), chosen), _parent(job.request["policy"])
    changed = diff(parent, text, label(job.request["policy"]), f"trial {chosen}")
    st.markdown(t("tune.diff"))
    if changed:
        st.code(changed, language="diff")
    else:
        st.caption(t("tune.no_diff"))
    left, right, _ = st.columns([1, 1, 1])
    left.download_button(
        t("tune.download_policy"), text, f"trial-{chosen}.yaml", width="stretch",
        key="tune_get_policy",
    )  # fmt: skip
    space = (job.folder / SPACE).read_text(encoding="utf-8")
    right.download_button(
        t("tune.download_space"), space, SPACE, width="stretch", key="tune_get_space"
    )


def _policy(folder: str, chosen: int) -> str:
    path = Path(folder) / "front" / f"trial-{chosen}.yaml"
    if not path.is_file():  # the parent, or one that is best and not at the front
        path = Path(folder) / "best.yaml"
    return path.read_text(encoding="utf-8")


def _parent(name: str) -> str:
    from policy.files import load_policy
    from twin.tune.asking import policy_text

    path = str(state.shelf().path_of(name))
    return policy_text(load_policy(path), path)


@st.cache_data(max_entries=50, show_spinner=False)
def _kept(job: str, chosen: int, folder: str, parent: str) -> str:
    """The policy is put on the shelf, so that every page can name it."""
    name = f"{parent}-tuned-{job[:4]}-{chosen}"
    return state.shelf().add_policy(name, _policy(folder, chosen)).name


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3g}"

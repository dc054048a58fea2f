"""A script must not be able to tell who started it: torchrun, a cold or a warm elastic-run.

The same probes (``probes/``) are run by each, and what they find is compared. What differs on
purpose is listed here, and in docs/warm-start.md.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrover_agent.workers.worker import EARLY_S
from tests.process.harness import Place, eventually

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_torch]

PROBES = Path(__file__).parent / "probes"
BY_LAUNCHER = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RESTART_COUNT", "PROBE_GO", "PROBE_OUT", "DLROVER_CACHE_DIR"),
}
"""Environment with a value of each run."""
OURS = {
    *(
        "DLROVER_AGENT_SOCKET",
        "DLROVER_AGENT_MARK",
        "DLROVER_LOCAL_RANK",
        "DLROVER_ROUND",
        "DLROVER_RESTART_REASON",
    ),
    *(
        "DLROVER_SHM_POOL",
        "DLROVER_TRANSFER_SOCKET",
        "DLROVER_PROBE_SOCKET",
        "DLROVER_SHARDS_SOCKET",
        "DLROVER_CHECKPOINT",
        "DLROVER_LOADER",
        "JOB_UID",
    ),
    "DLROVER_LOG_LEVEL",
    "DLROVER_TOPOLOGY",
}
BY_IMPORT = {"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""What imports put into the environment: there from the start in a warm worker."""


@dataclass
class Found:
    """What the probe of one launcher found, by rank."""

    state: list[dict[str, Any]]
    private: list[dict[str, Any]]


def warm_run(place: Place, argv: list[str], env: dict[str, str], name: str) -> str:
    """Run a job whose generation 1 waits until a zygote is ready; return what it said."""
    go, words = place.folder / f"{name}-go", place.folder / f"{name}.log"
    env = {**env, "PROBE_GO": str(go), "DLROVER_LOG_LEVEL": "INFO"}
    with words.open("w") as output:
        process = place.popen(*argv, env=env, stdout=output, stderr=output)
    try:
        eventually(lambda: "workers_started" in words.read_text(), "workers", within_s=300)
        # The recipe of workers that die early is not kept for the next run.
        old = time.monotonic() + EARLY_S
        eventually(
            lambda: (
                ("zygote_ready" in words.read_text() and time.monotonic() > old)
                or process.poll() is not None
            ),
            "a zygote, and workers that have lived for some time",
            within_s=300,
        )
        go.touch()
        process.wait(timeout=300)
    finally:
        process.kill()
    text = words.read_text()
    assert "zygote_ready" in text, text
    for word in ("zygote_lost", "warm_start_failed", "warm_start_disabled"):
        assert word not in text, text
    return text


def probe(place: Place, launcher: str, script: list[str], nproc: int = 2, **environ: str) -> Found:
    out = place.folder / f"out-{launcher}"
    out.mkdir()
    env = {**environ, "PROBE_OUT": str(out)}
    if launcher in FORKED:
        env["DLROVER_CACHE_DIR"] = str(place.folder / "cache")
    common = ["--standalone", f"--nproc-per-node={nproc}", "--max-restarts=3"]
    if launcher == "torchrun":
        argv = ["torchrun", *common, *script]
    else:
        cold = ["--cold-start"] if launcher == "cold" else []
        argv = ["elastic-run", *common, *cold, *script]
    # On a busy machine a start may not wait for its zygote until that is ready.
    for _ in range(3 if launcher == "first" else 1):
        if launcher == "warm":
            warm_run(place, argv, env, "warm")
        else:
            done = place.call(*argv, env=env, stdin=subprocess.DEVNULL, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(nproc)]
        if all(f["state"]["warm"] for f in found):
            break
    return Found([f["state"] for f in found], [f["private"] for f in found])


LAUNCHERS = ("torchrun", "cold", "observed", "warm", "first")
"""The last one is a first generation that is forked, with the recipe that the warm run has left."""
FORKED = ("warm", "first")


def compare(found: dict[str, Found]) -> None:
    differences = []
    for launcher, run in found.items():
        for rank, got in enumerate(run.state):
            assert got.pop("warm") is (launcher in FORKED)
            for name in BY_LAUNCHER | OURS | BY_IMPORT:
                got["env"].pop(name, None)
            expected = found["torchrun"].state[rank]
            for name, value in got.items():
                if value == expected[name]:
                    continue
                wanted, where = expected[name], (launcher, rank, name)
                if isinstance(value, dict) and isinstance(wanted, dict):
                    value = {k: v for k, v in value.items() if wanted.get(k) != v}
                    wanted = {k: v for k, v in wanted.items() if got[name].get(k) != v}
                differences.append(f"{where}: {value!r} != {wanted!r}"[:1600])
    assert not differences, "\n".join(differences)
    for launcher, run in found.items():
        for name in run.private[0]:
            values = [private[name] for private in run.private]
            assert values[0] != values[1], f"{launcher}: both workers have the same {name}"


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_finds_the_same_world(place: Place, how: str) -> None:
    huge = "x" * 100_000
    args = ["--flag", "a b", "", "ünï", huge]
    script = [str(PROBES / "state.py")]
    environ: dict[str, Any] = {"PYTHONHASHSEED": "0"}
    if how == "script":
        environ |= {"PYTHONDONTWRITEBYTECODE": "1"}
    else:
        script = ["-m", "tests.process.probes.state"]
        environ |= {
            "PYTHONOPTIMIZE": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # torch is compiled anew, without assertions: once
            "PYTHONWARNINGS": "ignore::ImportWarning",
            "PYTHONFAULTHANDLER": "1",
            "LC_ALL": "C",
            "OMP_NUM_THREADS": "2",
            "TORCH_LOGS": "-dynamo",
            "PYTHONPATH": str(PROBES.parents[2]),
        }
    launchers = LAUNCHERS if how == "script" else ("torchrun", "warm")
    # no assert: compare() asserts that all are equal
    compare({x: probe(place, x, [*script, *args], **environ) for x in launchers})


def endings(folder: Path) -> Iterator[tuple[str, str]]:
    """Standard output and error of each generation, in their order."""
    files = sorted(folder.rglob("stderr.log"), key=lambda p: p.stat().st_mtime)
    for errors in files:
        yield (errors.parent / "stdout.log").read_text(), errors.read_text()


def plain(text: str) -> str:
    """Without what differs between any two runs."""
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    # faulthandler shows the thread that speaks to the agent, too, wherever it is just then.
    text = re.sub(r"Thread 0x [^\n]*\n  <no Python frame>\n\n", "", text)
    text = re.sub(r"Thread 0x [^\n]*\n  File [^\n]*/process/probe.py[^\n]*\n\n", "", text)
    # faulthandler shows the stack below the script: ours, and no more
    return re.sub(r'(?m)^  File ".*(dlrover_agent/|<string>).*\n', "", text)


def test_a_script_ends_in_the_same_way(place: Place) -> None:
    script = str(PROBES / "ends.py")
    common = ["--standalone", "--nproc-per-node=1", "--max-restarts=30"]
    logs = {x: place.folder / f"logs-{x}" for x in ("torchrun", "cold", "warm")}
    argv = ["torchrun", *common, "--redirects=3", "--log-dir", str(logs["torchrun"])]
    torchrun = place.call(*argv, script, timeout=600)
    assert torchrun.returncode == 0, torchrun.stderr
    elastic = ["elastic-run", *common, "--redirects=3", "--log-dir"]
    cold = place.call(*elastic, str(logs["cold"]), "--cold-start", script, timeout=600)
    assert cold.returncode == 0, cold.stderr
    said = warm_run(place, [*elastic, str(logs["warm"]), script], {}, "ends")
    expected = list(endings(logs["torchrun"]))
    assert len(expected) == 14
    codes = re.findall(r"worker 0 \(rank 0\) [^\"(]*", said)
    assert [c for c in codes if "killed by SIGABRT" in c]
    for launcher in ("cold", "warm"):
        got = list(endings(logs[launcher]))
        assert len(got) == len(expected), launcher
        for generation, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert mine[0] == theirs[0], (launcher, generation)
            assert plain(mine[1]) == plain(theirs[1]), (launcher, generation)

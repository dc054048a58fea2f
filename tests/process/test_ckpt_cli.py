"""``dlrover ckpt``: on checkpoints that a real persister has written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dlrover_py.checkpoint.directory import LEASE_FILE, CheckpointDirectory
from dlrover_py.cli.checkpoints import _damage
from dlrover_py.cli.commands import main
from dlrover_py.protocol.agents import PersistPhase
from tests import jsonform
from tests.programs import PROGRAMS
from tests.slots import Persister, full, order, raw, rows, saved, stage

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

WITHOUT = str(PROGRAMS / "command_without_package.py")
W = torch.arange(12 * 5, dtype=torch.float32).reshape(12, 5)
HALF = torch.linspace(0, 1, 7).to(torch.bfloat16)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 5, 6 and 7 of two ranks: shards, a copy, a private value, an object."""
    folder = tmp_path_factory.mktemp("ckpt")
    one = Persister()
    try:
        for step in (5, 6, 7):
            for rank in range(2):
                stage(
                    folder / f"pool/{rank}.{step % 3}",
                    [
                        (
                            rows("model.w", rank * 6, 6, 12, 5),
                            raw(W[rank * 6 : rank * 6 + 6] + step),
                        ),
                        (full("model.half", (7,), "bfloat16"), raw(HALF)),
                        (full("optimizer.state.w.exp_avg", (12, 5)), raw(-W)),
                        (full(f"rank/{rank}/rng", (3,), "uint8"), bytes(3)),
                    ],
                    {"epoch": saved(step)},
                    rank=rank,
                    world=2,
                    step=step,
                    metric=1.0 / step,
                )
            wish = order(folder / "pool", folder / "store", f"c{step}", step=step)
            one.send(wish.model_copy(update={"world": 2, "ranks": [0, 1]}))
            answer = one.end(f"c{step}")
            assert answer.phase is PersistPhase.DONE, answer
    finally:
        one.close()
    return folder / "store"


@pytest.fixture
def store(written: Path, tmp_path: Path) -> str:
    """A copy, for one test."""
    shutil.copytree(written, tmp_path / "store")
    return str(tmp_path / "store")


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["ckpt", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_ls_and_show(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", str(written))
    lines = out.splitlines()
    assert code == 0
    columns = ["STEP", "AGE", "SIZE", "WORLD", "METRIC", "CERTIFIED", "JOB", "FOLDER"]
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines[1:]] == ["7", "6", "5"]
    code, out, _ = call(capsys, "ls", str(written), "--json")
    listed = json.loads(out)
    assert [row["step"] for row in listed] == [7, 6, 5]
    assert jsonform.faults(listed) == set()
    assert [row["at"] for row in listed] == sorted((row["at"] for row in listed), reverse=True)
    code, out, _ = call(capsys, "show", str(written))
    assert "model.w" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("model.w ")] == ["2"]
    code, out, _ = call(capsys, "show", str(written), "6", "--json")
    said = json.loads(out)
    assert said["step"] == 6
    assert jsonform.faults(said) == set()
    assert said["at"] == listed[1]["at"]
    assert {t["key"]: t["shape"] for t in said["tensors"]}["model.w"] == [12, 5]
    assert [o["key"] for o in said["objects"]] == ["epoch"]


def test_what_is_not_there_is_told(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "show", str(written), "8")
    assert code == 2
    assert "no checkpoint '8'; existing steps: 7, 6, 5" in err
    code, out, _ = call(capsys, "ls", str(tmp_path))
    assert (code, "there is no checkpoint" in out) == (0, True)
    code, _, err = call(capsys, "verify", str(tmp_path))
    assert (code, "there is no checkpoint" in err) == (2, True)
    for argv in (["ls"], ["ls", "--json"], ["show"], ["verify"], ["rm", "--keep=1"]):
        code, out, err = call(capsys, argv[0], str(tmp_path / "none"), *argv[1:])
        assert (code, out, "none: there is no such folder" in err) == (2, "", True)


def test_verify_finds_a_flipped_bit(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", store)
    assert code == 0
    assert out.count(": intact: ") == 3
    manifest = CheckpointDirectory(store).checkpoints()[1]
    at = next(w for w in manifest.chunks if w.chunk.key == "model.w")
    path = Path(store, manifest.folder, at.file)
    data = bytearray(path.read_bytes())
    data[at.position + 9] ^= 16
    path.write_bytes(data)
    Path(f"{store}/step-5.c5.json").write_bytes(b"torn")
    code, out, err = call(capsys, "verify", store, "--json")
    said = json.loads(out)
    assert code == 1
    assert said["intact"] == ["step-7.c7"]
    assert list(said["damaged"]) == ["step-5.c5.json", "step-6.c6"]
    assert "model.w: its 120 bytes at" in said["damaged"]["step-6.c6"][0]
    assert "step-5.c5.json is damaged" in err
    assert call(capsys, "verify", store, "7")[0] == 0
    code, _, err = call(capsys, "export", store, f"{store}.safetensors", "--which", "6")
    assert code == 1
    assert "model.w: its 120 bytes" in err
    assert not Path(f"{store}.safetensors").exists(), "nothing is left half"


def test_verify_misses_a_file(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(store, "step-7.c7/__0_0.distcp").unlink()
    code, out, _ = call(capsys, "verify", store, "7")
    assert code == 1
    assert "__0_0.distcp: No such file" in out


def test_verify_reads_what_torch_will_read(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(store, "step-7.c7/.metadata")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"model.half", b"model.hole")):
        path.write_bytes(damaged)
        code, out, _ = call(capsys, "verify", store, "7")
        assert code == 1
        assert "torch cannot load it: .metadata: the bytes differ from those" in out


def test_no_flipped_byte_of_any_file_is_missed(tmp_path: Path) -> None:
    """Torch reads what stands around the tensors as well. Only the claim is no part of it."""
    one = Persister()
    try:
        stage(
            tmp_path / "pool/0.0",
            [(full("model.w", (3,)), raw(W[0, :3])), (full("rank/0/rng", (2,), "uint8"), b"ab")],
            {"epoch": saved(7)},
        )
        one.send(order(tmp_path / "pool", tmp_path / "store", "c7"))
        assert one.end("c7").phase is PersistPhase.DONE
    finally:
        one.close()
    (whole,) = CheckpointDirectory(tmp_path / "store").checkpoints()
    names = {str(p.relative_to(tmp_path / "store")) for p in (tmp_path / "store").rglob("*.*")}
    folder = whole.folder
    assert names - {folder, LEASE_FILE} == {
        f"{folder}.json", f"{folder}/.metadata", f"{folder}/__0_0.distcp"
    }  # fmt: skip
    store = CheckpointDirectory(tmp_path / "store")
    assert _damage(store, whole, quiet=True) == []

    def is_missed(name: str) -> bool:
        if name == f"{folder}.json":
            return CheckpointDirectory(tmp_path / "store").checkpoints() == [whole]
        return not _damage(store, whole, quiet=True)

    missed = []
    for name in sorted(names - {folder, LEASE_FILE}):
        with (tmp_path / "store" / name).open("r+b", buffering=0) as file:
            for at, byte in enumerate(file.read()):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at)
                if is_missed(name):
                    missed.append((name, at))
                os.pwrite(file.fileno(), bytes([byte]), at)
    # A flip that leaves the manifest's meaning: the case of its digest's digits, the line's end.
    assert [(name, at) for name, at in missed if name != f"{folder}.json"] == []
    assert len(missed) <= 16 + 1
    assert _damage(store, whole, quiet=True) == []


def test_a_folder_of_torchs_own_is_told_so(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", f"{store}/step-7.c7")
    assert code == 0
    assert "is itself a checkpoint" in out
    code, _, err = call(capsys, "show", f"{store}/step-7.c7")
    assert code == 2
    assert "name the folder above it" in err


def test_export_as_safetensors(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.safetensors"
    code, _, _ = call(capsys, "export", str(written), str(out), "--keys", "model.")
    assert code == 0
    loaded = safetensors.torch.load_file(out)
    assert sorted(loaded) == ["half", "w"]
    assert torch.equal(loaded["w"], W + 7)
    assert torch.equal(loaded["half"], HALF)
    code, _, err = call(capsys, "export", str(written), str(out))
    assert code == 2
    assert "exists already: choose another path" in err
    code, _, err = call(capsys, "export", str(written), str(tmp_path / "x"), "--keys", "modell")
    assert "no tensor's key begins with 'modell'; the keys begin with model, optimizer" in err


def test_export_in_shards(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    size = ("--shard-gb", "0.0000003")
    assert call(capsys, "export", str(written), str(out), *size, "--which", "step-5.c5")[0] == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["model.half", "model.w", "optimizer.state.w.exp_avg"]
    assert index["metadata"]["total_size"] == 14 + 240 + 240
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        loaded |= safetensors.torch.load_file(out / file)
    assert torch.equal(loaded["model.w"], W + 5)
    assert torch.equal(loaded["optimizer.state.w.exp_avg"], -W)


@pytest.mark.parametrize(("name", "form"), [("x.safetensors", "safetensors"), ("x", "torch")])
def test_a_shard_size_for_a_single_file_is_refused(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, form: str
) -> None:
    argv = (str(tmp_path / name), "--format", form, "--shard-gb", "1")
    code, _, err = call(capsys, "export", store, *argv)
    assert (code, "--shard-gb splits safetensors in a folder" in err) == (2, True)
    assert not list(tmp_path.glob("x*"))


def test_export_for_torch_load(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.pt"
    assert call(capsys, "export", str(written), str(out), "--format", "torch")[0] == 0
    loaded = torch.load(out, weights_only=True)
    assert sorted(loaded) == ["epoch", "model.half", "model.w", "optimizer.state.w.exp_avg"]
    assert loaded["epoch"] == 7
    assert torch.equal(loaded["model.w"], W + 7)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_an_export_that_fails_leaves_nothing(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    manifest = CheckpointDirectory(store).checkpoints()[0]
    at = next(w for w in manifest.chunks if w.chunk.key == "optimizer.state.w.exp_avg")
    path = Path(store, manifest.folder, at.file)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[at.position + 9] ^= 16
    path.write_bytes(data)
    folder = tmp_path / "exports"
    size = ("--shard-gb", "0.0000003") if form == "safetensors" else ()
    argv = ("export", store, str(folder / "out"), "--format", form, *size)
    code, out, err = call(capsys, *argv)
    assert (code, out, "differ from those that were written" in err) == (1, "", True)
    assert list(folder.iterdir()) == [], "neither a shard without its index nor a part"
    path.write_bytes(whole)
    left = folder / ".out.part"
    left.mkdir()  # by one that was killed
    assert call(capsys, *argv)[0] == 0
    assert [path.name for path in folder.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file/out", "file: File exists"),
        ("file/out.safetensors", "file: File exists"),
        ("x" * 250, f".{'x' * 250}.part: File name too long"),
        ("x" * 300, f"{'x' * 300}: File name too long"),
    ],
    ids=["folder", "file", "part", "name"],
)
def test_an_export_that_cannot_be_written_is_told_in_a_line(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    code, _, err = call(capsys, "export", str(written), str(tmp_path / name))
    assert (code, err) == (1, f"dlrover: {tmp_path}/{why}\n")


def test_a_prefix_that_is_a_whole_key_leaves_no_name(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "half.safetensors"
    code, _, err = call(capsys, "export", str(written), str(out), "--keys", "model.half")
    assert (code, out.exists()) == (2, False)
    assert "'model.half' is a complete key" in err


def test_rm(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    def steps() -> list[int]:
        return [m.step for m in CheckpointDirectory(store).checkpoints()]

    code, _, err = call(capsys, "rm", store)
    assert (code, "expected either WHICH" in err) == (2, True)
    code, _, err = call(capsys, "rm", store, "7", "--yes")
    assert (code, "step 7 is the newest" in err) == (2, True)
    code, _, err = call(capsys, "rm", store, "6")
    assert (code, "confirm with --yes" in err) == (2, True)
    code, _, err = call(capsys, "rm", store, "--keep", "1", "6", "--yes")
    assert code == 2
    for argv in (["--keep", "1", "--highest"], ["6", "--highest"]):
        code, _, err = call(capsys, "rm", store, *argv, "--yes")
        assert (code, "--highest changes the meaning of --best" in err) == (2, True), argv
    code, _, err = call(capsys, "rm", store, "--keep", "1", "--newest-too", "--yes")
    assert (code, "--newest-too works only with WHICH" in err) == (2, True)
    assert steps() == [7, 6, 5], "nothing was removed so far"
    assert call(capsys, "rm", store, "--keep", "1", "--best", "1", "--highest", "--yes")[0] == 0
    assert steps() == [7, 5]
    assert not Path(store, "step-6.c6").exists()
    assert call(capsys, "rm", store, "step-7.c7", "5", "--newest-too", "--yes")[0] == 0
    assert steps() == []


def test_rm_of_what_is_damaged(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("step-7.c7", "step-6.c6"):
        Path(store, f"{folder}.json").write_bytes(b"torn")
    code, _, err = call(capsys, "rm", store, "7", "--yes")
    assert (code, "no checkpoint '7'" in err) == (2, True), "by its step one may mean another"
    code, _, err = call(capsys, "rm", store, "step-7.c7")
    assert (
        code,
        "this removes 0 of 1" in err,
        "a damaged manifest: step-7.c7: standard input" in err,
    ) == (2, 1, 1)
    code, out, _ = call(capsys, "rm", store, "step-7.c7", "--yes")
    assert (code, out) == (0, f"removed {store}/step-7.c7\n")
    assert list(Path(store).glob("step-7*")) == []
    code, _, _ = call(capsys, "rm", store, "5", "step-6.c6", "--newest-too", "--yes")
    assert (code, list(Path(store).glob("step-*"))) == (0, [])


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
def test_a_damaged_manifest_is_named_once(store: str, verb: str) -> None:
    Path(store, "step-6.c6.json").write_bytes(b"torn")
    program = Path(sys.executable).with_name("dlrover")
    done = subprocess.run([program, "ckpt", verb, store], capture_output=True, text=True)
    assert done.returncode == (verb == "verify")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dlrover: {store}/step-6.c6.json is damaged: ")


def test_looking_does_without_torch(written: Path, tmp_path: Path) -> None:
    """It is not installed where an administrator looks; and it takes seconds to import."""
    out = tmp_path / "o.safetensors"
    for verb in ("ls", "show", "verify"):
        subprocess.run([sys.executable, WITHOUT, "torch", "ckpt", verb, str(written)], check=True)
    export = [sys.executable, WITHOUT, "torch", "ckpt", "export", str(written), str(out)]
    subprocess.run([*export, "--keys", "optimizer."], check=True)
    assert torch.equal(safetensors.torch.load_file(out)["state.w.exp_avg"], -W)


@pytest.mark.parametrize("flags", [["--format", "torch"], ["--keys", "model."]])
def test_an_export_that_needs_torch_says_so_before_it_reads(
    written: Path, tmp_path: Path, flags: list[str]
) -> None:
    argv = [
        sys.executable,
        WITHOUT,
        "torch",
        "ckpt",
        "export",
        str(written),
        str(tmp_path / "out"),
        *flags,
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "which is not installed" in done.stderr
    assert "extra torch" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_export_of_shards_does_without_numpy(written: Path, tmp_path: Path) -> None:
    """torch does not depend on it."""
    out = tmp_path / "one.safetensors"
    argv = [
        sys.executable,
        "-W",
        "ignore",
        WITHOUT,
        "numpy",
        "ckpt",
        "export",
        str(written),
        str(out),
    ]
    subprocess.run([*argv, "--keys", "model."], check=True)
    assert torch.equal(safetensors.torch.load_file(out)["w"], W + 7)

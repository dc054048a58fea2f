"""elastic-run's command line, beside that of the installed torchrun."""

import argparse
import contextlib
import io
import os
import signal
import socket
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from dlrover_agent import flags
from dlrover_agent.cli import count_gpus, main, output_settings
from dlrover_agent.settings import Settings
from dlrover_agent.standalone import Endpoint, OwnMaster, misplaced_nodes
from dlrover_py.protocol import commands, names
from dlrover_py.protocol.errors import ConfigError, UnreachableError

INSTALLED = tuple(int(part) for part in version("torch").split(".")[:2])
"""The version of torch whose torchrun ours is compared with."""
NEW_FLAGS = {
    (2, 9): {"--event-log-handler", "--numa-binding"},
    (2, 13): {
        *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--signals-to-handle"),
        *("--shutdown-timeout", "--virtual-local-rank"),
    },
    (2, 15): {"--log-line-prefix-template", "--print-completion"},
}
"""Flags by the first version that has them, of those in `make matrix`. The others are in all."""
NOT_THERE = {flag for since, new in NEW_FLAGS.items() if since > INSTALLED for flag in new}


def of_torch(argv: list[str]) -> dict[str, Any]:
    """What the installed torchrun parses; older ones have the default of --master-port there."""
    from torch.distributed.run import get_args_parser

    found: dict[str, Any] = vars(get_args_parser().parse_args(argv))
    if INSTALLED < (2, 13) and found["master_port"] == flags.STATIC_PORT:
        found["master_port"] = None
    return found


def parse(*argv: str, **pet: str) -> flags.Flags:
    return flags.parse(argv, {f"PET_{k.upper()}": v for k, v in pet.items()})


def misused(*argv: str) -> str:
    said = io.StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit) as end:
        parse(*argv)
    assert end.value.code == 2
    text = said.getvalue()
    assert text.count("\n") == 1, text
    return text


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions


@pytest.fixture(scope="module")
def torchs() -> dict[str, object]:
    from torch.distributed.run import get_args_parser

    return {a.dest: a for a in actions(get_args_parser()) if a.dest != "help"}


def test_all_of_torchruns_flags_are_there(torchs: dict[str, object]) -> None:
    ours = {name: a for a in actions(flags.parser({})) for name in a.option_strings or [a.dest]}
    for dest, action in torchs.items():
        names = action.option_strings or [dest]  # type: ignore[attr-defined]
        assert set(names) <= set(ours)
        mine = ours[names[0]]
        assert (mine.dest, {ours[name] for name in names}) == (dest, {mine})
        for field in ("nargs", "required"):
            theirs = getattr(action, field)
            assert getattr(mine, field) == theirs, f"{dest}: {field}"
        old = dest == "master_port" and INSTALLED < (2, 13)
        assert mine.default == (None if old else action.default), dest  # type: ignore[attr-defined]
        choices = set(getattr(action, "choices", None) or ())
        if dest == "print_completion":  # the shells of the installed shtab, if there is one
            choices |= set(flags.SHELLS)
        assert set(mine.choices or ()) == choices


def test_values_become_what_they_become_there(torchs: dict[str, object]) -> None:
    argv = ["--nnodes=1:4", "--nproc_per_node", "gpu", "--max-restarts", "3", "-m", "-r", "0:1"]
    argv += ["--monitor-interval", "2", "--node_rank=2", "--master-port", "1", "--run_path"]
    newer = ["--duplicate-stdout-filters=a,b,,c", "--shutdown-timeout=5", "--virtual-local-rank"]
    newer += ["--numa-binding=core-complex", "--log-line-prefix-template=${hostname} "]
    argv += [flag for flag in newer if flag.partition("=")[0] not in NOT_THERE]
    argv += ["train", "-r", "3", "--nnodes", "x"]
    theirs, ours = of_torch(argv), vars(parse(*argv))
    assert {k: ours[k] for k in theirs} == theirs


def test_environment_stands_in_for_flags(
    torchs: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"nnodes": "2:3", "max_restarts": "4", "standalone": "1", "redirects": "3"}
    values |= {"log_dir": "x", "module": "0", "numa_binding": "node", "logs_specs": "y"}
    values |= {"duplicate_stderr_filters": "a,b", "master_port": "77", "virtual_local_rank": "2"}
    values |= {"log_line_prefix_template": "${rank}", "print_completion": "bash"}
    for name, value in values.items():
        monkeypatch.setenv(f"PET_{name.upper()}", value)
    theirs = of_torch(["train.py"])
    ours = vars(parse("train.py", **values))
    assert {k: ours[k] for k in theirs} == theirs
    beaten = of_torch(["--nnodes=5", "train.py"])
    assert vars(parse("--nnodes=5", "train.py", **values))["nnodes"] == beaten["nnodes"] == "5"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MASTER_PORT", "x", "argument --master-port/--master_port: invalid int value: 'x'"),
        ("MASTER_PORT", "65536", "--master-port is 65536: expected a port from 0 to 65535"),
        ("MASTER_ADDR", "a b", "--master-addr is 'a b': expected a host name or an IP address"),
        ("NNODES", "two", "--nnodes is 'two': expected N or MIN:MAX"),
        ("RDZV_ENDPOINT", "a:b", "--rdzv-endpoint is 'a:b': expected HOST:PORT"),
        ("MAX_RESTARTS", "-1", "--max-restarts is -1: expected a number from 0"),
        ("TEE", "9", "--tee is '9': expected 0, 1, 2 or 3"),
        ("NPROC_PER_NODE", "0", "--nproc-per-node is '0': expected a number from 1"),
        ("SHUTDOWN_TIMEOUT", "-1", "--shutdown-timeout is '-1': expected a number of seconds"),
        ("LOCAL_RANKS_FILTER", "-1", "--local-ranks-filter is '-1': expected local ranks"),
    ],
)
def test_a_wrong_value_is_blamed_on_the_variable_that_it_came_from(
    variable: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flag = "--" + variable.lower().replace("_", "-")
    many = [] if flag in ("--nnodes", "--rdzv-endpoint") else ["--nnodes=2"]

    def said(*argv: str) -> str:
        with contextlib.suppress(SystemExit):
            assert main([*many, *argv, __file__])
        return capsys.readouterr().err

    on_the_line = said(f"{flag}={value}")
    assert message in on_the_line
    assert "in the environment" not in on_the_line
    monkeypatch.setenv(f"PET_{variable}", value)
    from_there = said()
    assert message in from_there
    assert f"; PET_{variable} in the environment sets {flag}" in from_there
    assert "in the environment" not in said(f"{flag}={value}"), "the command line wins"


@pytest.mark.parametrize(
    ("words", "tasks", "why"),
    [
        ((), "4", "Slurm starts 4 tasks of this command, each is a node, and --nnodes is 1:"),
        (("--nnodes=1:2", "--rdzv-endpoint=h:1"), "3", "Slurm starts 3 tasks"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint="), "2", "meet at localhost"),
        (("--nnodes=2",), "", "meet at localhost"),
        (("--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), "4", ""),
        (("--nnodes=2", "--master-addr=h"), "2", ""),
        (("--standalone",), "8", ""),
        ((), "1", ""),
        ((), "x", ""),
        ((), "", ""),
    ],
)
def test_nodes_that_will_not_find_each_other_are_told(
    words: tuple[str, ...], tasks: str, why: str
) -> None:
    """`srun elastic-run train.py` made several trainings of one node each, without a word."""
    said, instead = misplaced_nodes(parse(*words, "train.py"), {"SLURM_STEP_NUM_TASKS": tasks})
    assert why in said
    assert bool(said) == bool(instead) == bool(why)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["python", "t.py"], "there is no such file; python is a program: write the script in"),
        (["--standalone", "--rdzv-conf=a", __file__], "--rdzv-conf is 'a': expected KEY=VALUE"),
    ],
)
def test_a_slip_on_one_machine_is_told(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words)
    assert message in capsys.readouterr().err


def test_a_choice_in_the_environment_is_checked() -> None:
    with pytest.raises(ConfigError, match="PET_START_METHOD is 'thread': expected spawn, fork"):
        parse("train.py", start_method="thread")


def test_switch_in_the_environment_is_a_number() -> None:
    with pytest.raises(ConfigError, match="PET_STANDALONE is 'yes': expected 0 or 1"):
        parse("train.py", standalone="yes")


@pytest.mark.parametrize("flag", sorted(flags.REFUSED))
def test_what_dlrover_has_and_we_do_not_is_refused_with_a_reason(flag: str) -> None:
    for spelling in (flag, flag[:2] + flag[2:].replace("-", "_")):
        assert flags.REFUSED[flag] in misused(spelling, "x", "train.py")


@pytest.mark.parametrize(
    "words",
    [
        ["--save", "/ckpt"],
        ["--no", "--nnodes=9", "-m", "-r", "--help"],
        ["--", "--lr", "1"],
        ["--", "--", "-h"],
        ["--"],
        ["a", "--", "b"],
        ["--save", "--", "/ckpt"],
        ["-h"],
    ],
)
@pytest.mark.parametrize("head", [[], ["-m"], ["--nnodes", "2", "-r3"], ["--"], ["--tee=1", "--"]])
def test_what_stands_behind_the_script_is_the_scripts(head: list[str], words: list[str]) -> None:
    found = parse(*head, "train", *words)
    assert (found.training_script, found.training_script_args) == ("train", words)
    dropped = words[0] == "--" and "--" not in head  # by torchrun, see migrating-from-torchrun.md
    if not dropped and ("--no" not in words or "--" in head):  # torch refuses it, by its Python
        theirs = of_torch([*head, "train", *words])
        assert {k: vars(found)[k] for k in theirs} == theirs


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--max", "3"], ["--max-restarts", "3"]),
        (["--rdzv_e=h:1"], ["--rdzv-endpoint=h:1"]),
        (["--nproc", "2"], ["--nproc-per-node", "2"]),
        (["--stand"], ["--standalone"]),
        (["-mr", "3"], ["-m", "-r", "3"]),
    ],
)
def test_torchruns_flags_may_be_abbreviated(short: list[str], long: list[str]) -> None:
    assert vars(parse(*short, "t", "--max=4")) == vars(parse(*long, "t", "--max=4"))


def test_an_abbreviation_of_several_flags_names_them() -> None:
    said = misused("--lo", "x", "train.py")
    assert "ambiguous flag --lo: it could be --local-addr, --local-ranks-filter, --log-dir" in said


def test_the_table_of_flags_is_the_parsers() -> None:
    switches: set[str] = set()
    values: set[str] = set()
    for action in actions(flags.parser({})):
        names = {
            "--" + n[2:].replace("_", "-") if n[1] == "-" else n for n in action.option_strings
        }
        (values if action.nargs is None else switches).update(names)
    assert switches == commands.SWITCHES | commands.ELASTIC_RUN_SWITCHES
    assert values == commands.VALUES | commands.ELASTIC_RUN_VALUES


def test_torchruns_part_of_the_table_is_torchruns(torchs: dict[str, object]) -> None:
    names = {n for a in torchs.values() for n in a.option_strings}  # type: ignore[attr-defined]
    plain = {n for n in names if "_" not in n}
    assert plain | NOT_THERE | {"--help", "-h"} == commands.SWITCHES | commands.VALUES
    assert not plain & NOT_THERE


def test_the_template_of_the_flag_comes_before_the_one_of_the_older_variable() -> None:
    def prefix(*argv: str, **pet: str) -> str:
        older = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"}
        return output_settings(parse(*argv, "t.py", **pet), older).line_prefix("main", 3, 1)

    assert prefix() == "<3>"
    assert prefix("--log-line-prefix-template=${local_rank}/${other}") == "1/${other}"
    assert prefix("--log_line_prefix_template", "${hostname} ") == f"{socket.gethostname()} "
    assert prefix(log_line_prefix_template="${role_name}") == "main"


@pytest.mark.parametrize("shell", flags.SHELLS)
def test_a_completion_script_is_made_from_the_parser(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--print-completion", shell)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for text in ("elastic-run", "nproc-per-node", "cold-start", "exclusive"):
        assert text in printed
    assert "--membind-policy" not in printed, "refused flags are not proposed"


def test_a_completion_script_needs_shtab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)  # as if it were not installed
    with pytest.raises(SystemExit) as end:
        parse("--print_completion=zsh")
    assert end.value.code == 1
    assert "needs the package shtab" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["--auto-tunning", "--auto_tunning"])
def test_the_auto_tuner_is_off_unless_dlrovers_flag_is_given(spelling: str) -> None:
    assert not flags.parse(["train.py"], {}).auto_tunning
    assert flags.parse([spelling, "train.py"], {}).auto_tunning


def test_dlrovers_checks_have_levels() -> None:
    assert parse("t").precheck == 0
    assert parse("--network-check", "t").precheck == 1
    assert parse("--network_check", "--comm-perf-test", "t").precheck == 2
    assert parse("--precheck", "2", "--network-check", "t").precheck == 2
    assert parse("--numa-affinity", "t").numa_binding == "node"


@pytest.mark.parametrize("flag", ["--network-check", "--comm_perf_test", "--precheck"])
def test_a_check_without_torch_names_the_flag_that_was_written(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    number = ["1"] if flag == "--precheck" else []
    assert main([flag, *number, __file__]) == 1
    assert f"elastic-run: {flag}: " in capsys.readouterr().err


def test_another_launcher_as_the_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "torch.distributed.run", "--nproc_per_node=2", "t.py", "--lr", "1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("elastic-run: the script is another launcher, torchrun: ")
    assert said.endswith("write: elastic-run --nproc_per_node=2 t.py --lr 1\n")


def test_auto_config_takes_what_it_finds() -> None:
    def auto(number: str, *argv: str) -> tuple[str, str, int]:
        found = flags.parse(["--auto-config", *argv, "t"], {"NODE_NUM": number})
        return found.nnodes, found.nproc_per_node, found.precheck

    assert auto("3") == ("3", "auto", 0)
    assert auto("4") == ("4", "auto", 1)
    assert auto("4", "--nnodes=2:4", "--nproc-per-node=2", "--precheck=2") == ("2:4", "2", 2)
    with pytest.raises(ConfigError, match="NODE_NUM is 'x'"):
        auto("x")


@pytest.mark.parametrize(
    ("text", "sizes"), [("1", (1, 1)), ("1:4", (1, 4)), ("4:4", (4, 4)), (" 2 ", (2, 2))]
)
def test_nodes(text: str, sizes: tuple[int, int]) -> None:
    assert flags.nodes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:2:3", "-1", "a", "1:", "0:2"])
def test_nodes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes is"):
        flags.nodes(text)


def test_another_number_of_nodes_than_the_endpoints_is_named() -> None:
    ours = Endpoint(run_id="r", fewest=2, most=3, host="h", port=1)
    assert ours.size_difference(2, 3) == ""
    words = "it is 2:3 here, and 2:2 at h:1, which decides: use one value"
    assert ours.size_difference(2, 2) == words


def test_streams_are_torchs(torchs: dict[str, object]) -> None:
    from torch.distributed.elastic.multiprocessing.api import Std, to_map

    from dlrover_agent.settings import OutputSettings

    for text in ("0", "1", "3", "0:3", "0:3,1:0,2:1,3:2"):
        theirs = {rank: int(std) for rank, std in to_map(Std.from_str(text), 4).items()}
        mine = flags.streams("-r", text)
        assert {rank: OutputSettings.of(mine, rank) for rank in range(4)} == theirs
    for text in ("", "4", "0:4", "0-1", "3,"):
        with pytest.raises(ValueError, match="does not match"):
            Std.from_str(text)
        with pytest.raises(ConfigError, match="--tee is"):
            flags.streams("--tee", text)
    assert (
        OutputSettings.of(flags.streams("-r", "12:3"), 12) == 3
    )  # torchrun's ranks have one digit


def test_conf_is_torchs(torchs: dict[str, object]) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    for text in ("", "a=1", " a = 1 , b=c=d ", "timeout=3,is_host=true"):
        assert flags.conf(text) == _parse_rendezvous_config(text)
    for text in ("a", "=1", "a=", "a=1,"):
        with pytest.raises(ValueError, match="rendezvous configuration"):
            _parse_rendezvous_config(text)
        with pytest.raises(ConfigError, match="--rdzv-conf is"):
            flags.conf(text)


@examples(st.text("[]:.1a9 -", max_size=12))
def test_endpoint_is_torchs(text: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        expected = parse_rendezvous_endpoint(text, default_port=29400)
    except ValueError:
        with pytest.raises(ConfigError, match="endpoint"):
            flags.endpoint(text, 29400)
    else:
        assert flags.endpoint(text, 29400) == expected


def test_signals() -> None:
    assert flags.signals("SIGTERM, SIGUSR1,SIGTERM") == (signal.SIGTERM, signal.SIGUSR1)
    for text in ("", "SIGFOO", "SIGKILL", "15"):
        with pytest.raises(ConfigError, match="--signals-to-handle"):
            flags.signals(text)


def test_where_the_master_runs() -> None:
    def where(*argv: str) -> tuple[str, int, int | None, bool | None]:
        e = Endpoint.of(parse(*argv, "t"))
        return e.host, e.port, e.node_rank, e.hosts

    alone = ("", 0, None, None)
    assert where() == where("--standalone") == where("--nnodes=1:1") == alone
    assert where("--standalone", "--rdzv-endpoint=x:1") == alone
    assert where("--standalone", "--nnodes=1:4", "--rdzv-backend=etcd") == alone
    assert where("--master-port=7") == ("127.0.0.1", 7, 0, True)
    assert where("--master-port=0") == ("127.0.0.1", 0, 0, True)
    two = ("--nnodes=2", "--master-addr=h")
    assert where(*two) == ("h", 29500, 0, True)
    assert where(*two, "--node-rank=1", "--master-port=7") == ("h", 7, 1, False)
    assert where("--nnodes=2", "--rdzv-endpoint=g:8", "--node-rank=1") == ("g", 8, 1, False)
    c10d = ("--nnodes=1:2", "--rdzv-backend=c10d")
    assert where(*c10d) == ("localhost", 29400, None, None)
    assert where(*c10d, "--rdzv-endpoint=[::1]") == ("::1", 29400, None, None)
    assert where(*c10d, "--rdzv-endpoint=h", "--rdzv-conf=is_host=1") == ("h", 29400, None, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--nnodes=1:2",), "expected one number"),
        (("--nnodes=2", "--node-rank=2"), "expected a rank from 0 to 1"),
        (("--nnodes=2", "--rdzv-backend=etcd"), "expected c10d or static"),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:0"), "port 0"),
        (("--nnodes=2", "--standalone"), "exactly one node"),
        (("--nnodes=3", "--node-unit=2"), "multiples of the unit"),
        (("--nnodes=2", "--rdzv-conf=jointimeout=3"), "expected one of join_timeout"),
        (("--nnodes=2", "--rdzv-conf=join_timeout=soon"), "expected a number above 0"),
        (("--nnodes=2", "--rdzv-conf=keep_alive_max_attempt=0"), "expected a number above 0"),
        (("--nnodes=2", "--rdzv-conf=last_call_timeout=100000"), "expected at most a day"),
        (("--nnodes=2", "--node-rank=-1"), "--node-rank is -1"),
    ],
)
def test_rendezvous_that_makes_no_sense(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Endpoint.of(parse(*argv, "t"))


def test_ids_give_the_ranks_of_a_static_rendezvous() -> None:
    e = Endpoint.of(parse("--nnodes=12", "--node-rank=11", "--master-addr=h", "t"))
    assert e.node_id() == "n11"
    c10d = Endpoint.of(parse("--nnodes=12", "--rdzv-backend=c10d", "t"))
    assert f"-{os.getpid()}-" in c10d.node_id()
    assert c10d.node_id() != c10d.node_id()


def test_rules_come_from_the_conf() -> None:
    conf = "keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=7,join_timeout=9"
    e = Endpoint.of(parse("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-conf={conf}", "t"))
    assert e.rules == {
        "DLROVER_MASTER_JOIN_TIMEOUT_S": "9",
        "DLROVER_MASTER_LAST_CALL_S": "7",
        "DLROVER_MASTER_LEASE_S": "8",
        "DLROVER_MASTER_EXCHANGE_S": "1",
    }


@pytest.mark.parametrize("flags", [["--standalone"], ["--nnodes=1"]])
def test_one_machine_names_the_keys_of_the_conf_and_ignores_them(
    flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    conf = "--rdzv-conf=keep_alive_interval=5,last_call_timeout=0,protocol=http"
    assert not Endpoint.of(parse(*flags, conf, "t")).rules
    named = [vars(record).get("flag") for record in caplog.records]
    keys = ("keep_alive_interval", "last_call_timeout", "protocol")
    assert named == [f"--rdzv-conf {key}" for key in keys]


def test_a_key_of_torchs_store_is_named(caplog: pytest.LogCaptureFixture) -> None:
    conf = "--rdzv-conf=cas_backoff_max_seconds=1"
    assert not Endpoint.of(parse("--nnodes=2", "--rdzv-backend=c10d", conf, "t")).rules
    assert "flag_not_used" in caplog.text


def test_token_differs_by_run_and_says_nothing_of_it(tmp_path: Path) -> None:
    a, b = Endpoint(run_id="a"), Endpoint(run_id="b")
    assert a.token != b.token
    assert len(a.token) == 64


@pytest.mark.parametrize(
    ("flags", "secret", "warned"),
    [
        (["--rdzv-endpoint=192.0.2.1:0"], "", True),
        (["--rdzv-endpoint=192.0.2.1:0", "--rdzv-id=none"], "", True),
        (["--rdzv-endpoint=192.0.2.1:0", "--rdzv-id=run7"], "", False),
        (["--rdzv-endpoint=192.0.2.1:0"], "s" * 16, False),
        (["--rdzv-endpoint=localhost:0"], "", True),
        (["--rdzv-endpoint=localhost:0", "--rdzv-id="], "", True),
        (["--rdzv-endpoint=127.0.1.1:0"], "", True),
        (["--rdzv-endpoint=localhost:0", "--rdzv-id=run7"], "", False),
        (["--rdzv-endpoint=localhost:0"], "s" * 16, False),
        (["--standalone"], "", False),
    ],
)
def test_a_port_for_everybody_is_warned_of(
    caplog: pytest.LogCaptureFixture, flags: list[str], secret: str, warned: bool
) -> None:
    own = OwnMaster(Endpoint.of(parse("--rdzv-backend=c10d", *flags, "t")), secret)
    with own._listen() as listening:
        port = listening.getsockname()[1]
    said = [record for record in caplog.records if record.getMessage() == "job_token_guessable"]
    assert [vars(record)["port"] for record in said] == ([port] if warned else [])
    assert all("--rdzv-id" in vars(record)["instead"] for record in said)


@pytest.mark.parametrize(
    ("host", "nodes", "elsewhere"),
    [
        ("192.0.2.1", 2, True),  # of nobody (RFC 5737)
        ("192.0.2.1", 1, False),
        ("127.0.1.1", 2, False),
        ("no.such.host.invalid", 2, False),  # it may come up later
    ],
)
def test_endpoint_that_is_another_machine(host: str, nodes: int, elsewhere: bool) -> None:
    assert Endpoint(run_id="x", host=host, most=nodes).is_elsewhere() == elsewhere


def test_endpoint_that_is_this_machine() -> None:
    def here(host: str) -> bool:
        return Endpoint(run_id="x", host=host).is_here()

    assert here("localhost")
    assert here("127.0.1.1")
    assert here("::1")
    assert here(socket.gethostname())
    assert not here("192.0.2.1")  # of nobody (RFC 5737)
    assert not here("no.such.host.invalid")
    assert not here("a..b")
    assert not here("x" * 80)


def test_a_job_on_this_machine_alone_uses_nothing_of_a_job_around_it() -> None:
    """Its master did not start inside a node of another job, and refused the CA of its platform."""
    alone = Endpoint.of(parse("--standalone", "t"))
    alone.check(Path("/var/run/dlrover/ca.crt"))
    assert OwnMaster(alone, "the other job's token").token != "the other job's token"
    c10d = Endpoint.of(parse("--rdzv-backend=c10d", "t"))
    with pytest.raises(ConfigError, match="does not speak TLS"):
        c10d.check(Path("ca.crt"))
    assert OwnMaster(c10d, "its token").token == "its token"


def test_address_of_a_node_is_the_one_that_the_endpoint_sees() -> None:
    def at(host: str, **more: Any) -> str:
        return Endpoint(run_id="x", host=host, **more).advertised_addr(lambda _: None)

    assert at("") == "127.0.0.1"
    assert at("localhost") == "127.0.0.1"
    assert at("127.0.1.1") == "127.0.1.1"  # its own name, whatever that means elsewhere
    assert at("192.0.2.1", hosts=True) == "192.0.2.1"
    assert at("192.0.2.1", local_addr="10.1.1.1") == "10.1.1.1"
    with pytest.raises(UnreachableError, match="no such host within 0 s"):
        at("no.such.host.invalid", connect_s=0.0)


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("0,0", 0), ("GPU-a", 1)]
)
def test_visible_gpus_are_counted_as_cuda_reads_them(visible: str, count: int) -> None:
    assert count_gpus(visible) == count


def test_an_empty_variable_counts_as_one_that_is_not_set() -> None:
    read = (
        *("PYTHON_EXEC", "DLROVER_LOG_LEVEL", names.ENV_MASTER_ADDR, names.ENV_TOKEN_FILE),
        *(names.ENV_CA_FILE, names.ENV_NODE_ID, names.ENV_JOB_NAME, names.ENV_LOG_DIR),
        *(names.ENV_LIFELINE_FD, names.ENV_CONNECT_S, names.ENV_SHM_DIR, names.ENV_JOB_UID),
    )
    empty = Settings.from_environment(dict.fromkeys(read, ""))
    assert replace(empty, environ={}) == Settings.from_environment({})
    assert empty.python == sys.executable

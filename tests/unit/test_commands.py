"""What all commands of `elastic-etcd` have in common, and how a shell completes them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.__main__ import _USAGE, main

COMMANDS = re.findall(r"elastic-etcd (\w+)", _USAGE.partition("\n\n")[0])
ONE_JOB = ("scale", "wait")
NOT_OF_A_JOB = ("launch", "check")
OF_A_JOB = [name for name in COMMANDS if name not in NOT_OF_A_JOB]
# What bash does when somebody presses the tab key after these words.
TAB = """
source "$1" && shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
how=$(complete -p elastic-etcd)
how=${how#*-F }
${how%% *} elastic-etcd "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert re.search(r"^exit codes:\n  \d+ ", told, re.MULTILINE)
    assert "_" not in " ".join(re.findall(r"--[\w-]+", told)), "each flag once"
    if command in OF_A_JOB:
        assert "--json" in told
        assert "130" in told
        assert ("--all" in told.partition("\n\n")[0]) == (command not in ONE_JOB)


@pytest.mark.parametrize("typed", ["stauts", "stat", "foget", "lunch"])
def test_a_command_that_is_mistyped(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    meant = {"stauts": "status", "stat": "status", "foget": "forget", "lunch": "launch"}[typed]
    assert main([typed, "j"]) == 2
    told = f"error: {typed}: no such command (did you mean {meant}?)\nSee elastic-etcd --help.\n"
    assert capsys.readouterr().err == told
    assert main(["zebra"]) == 2
    assert capsys.readouterr().err.startswith("error: zebra: no such command\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--etcd", "--rdzv-endpoint", "--prefix", "--user", "--cacert"])
def test_n3_an_empty_value_is_an_error(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a variable that is not set: without --etcd each node would train alone."""
    assert main([command, f"{flag}=", "j", "n"]) == 2
    told = capsys.readouterr().err
    assert f"error: {flag.replace('rdzv-endpoint', 'etcd')}" in told
    assert "is empty" in told or "a prefix is" in told


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["ETCDCTL_ENDPOINTS", "PET_ETCD", "PET_RDZV_ENDPOINT"])
def test_n3_an_empty_variable_is_an_error(
    command: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, "")
    after = {"scale": ["j", "2:4"], "drain": ["j", "n"], "undrain": ["j", "n"], "check": []}
    assert main([command, *after.get(command, ["j"])]) == 2
    assert f"error: {name} is in the environment, and empty" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in OF_A_JOB if name not in (*ONE_JOB, "serve")])
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "no job given: give its id, or --all"),
        (("j", "--all"), "j and --all: give one of both"),
    ],
)
def test_a_job_or_all_of_them(
    command: str, argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"drain": ["n"], "undrain": ["n"]}.get(command, [])
    if command == "drain" and not argv:
        more = []
    assert main([command, *argv, *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("j", "--older-than=604800"), "--older-than goes with --all: j would be removed however"),
        (("--all", "--yes", "--force"), "--force goes with one JOB: a deserted one has no end"),
    ],
)
def test_what_forget_could_not_heed_is_refused(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forget", *argv, "--etcd=127.0.0.1:1"]) == 2
    assert f"error: {told}" in capsys.readouterr().err


@pytest.mark.parametrize("command", OF_A_JOB)
def test_a_wrong_variable_is_told_as_a_wrong_flag_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_PREFIX", "no-slash")
    assert main([command, "j"]) == 2
    assert "error: PET_PREFIX=no-slash in the environment" in capsys.readouterr().err


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "completion"
    path.write_text(printed("bash", capsys))
    return path


def completed(script: Path, *words: str) -> set[str]:
    argv = ["bash", "--norc", "-c", TAB, "bash", str(script), "elastic-etcd", *words]
    done = subprocess.run(argv, cwd=script.parent, check=True, capture_output=True, text=True)
    assert not done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_values(script: Path) -> None:
    assert completed(script, "") == set(COMMANDS)
    assert completed(script, "und") == {"undrain"}
    assert completed(script, "drain", "--se") == {"--self"}
    assert "--nproc-per-node" in completed(script, "launch", "--nproc")
    assert completed(script, "launch", "--hang-action", "") == {"report", "restart"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(shell, capsys)
    assert all(command in told for command in COMMANDS)


def test_what_completion_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "cmd"])
    assert "invalid choice: 'cmd'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err

"""What all commands of `elastic-etcd` have in common."""

import re

import pytest

from elastic_etcd.__main__ import _USAGE, main

COMMANDS = re.findall(r"elastic-etcd (\w+)", _USAGE.partition("\n\n")[0])
OF_A_JOB = [name for name in COMMANDS if name != "launch"]
WITHOUT_JSON = {"top"}  # a screen; what it shows is in status --json


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert re.search(r"^exit codes:\n  0 ", told, re.MULTILINE)
    assert "_" not in " ".join(re.findall(r"--[\w-]+", told)), "each flag once"
    if command in OF_A_JOB:
        assert ("--json" in told) == (command not in WITHOUT_JSON)


@pytest.mark.parametrize("command", OF_A_JOB)
def test_a_wrong_variable_is_told_as_a_wrong_flag_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_PREFIX", "no-slash")
    assert main([command, "j"]) == 2
    assert "error: PET_PREFIX=no-slash in the environment" in capsys.readouterr().err

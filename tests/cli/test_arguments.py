"""What the command line understands: help, options, suggestions, completion."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.cli import main
from skerry.cli.command import JobCommand
from skerry.cli.options import HELP, options_of, split
from skerry.cli.table import COMMANDS, command_class, listed, overview
from skerry.config import Config
from skerry.errors import ConfigError

HEAVY = ("torch", "grpc", "numpy", "google.protobuf", "matplotlib")


def skerry(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skerry", *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("arguments", [(), *((name,) for name in COMMANDS)], ids=lambda words: " ".join(words) or "skerry")
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom skerry.cli import main\n"
        f"try: main([*{arguments!r}, '--help'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules]\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: skerry")


def test_the_list_of_commands_imports_no_command_and_no_tyro() -> None:
    code = "import sys\nfrom skerry.cli import main\nmain(['--help'])\nassert 'tyro' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(f"\n  {name} " in found.stdout for name in listed())


def test_every_command_has_a_heading_and_a_description() -> None:
    assert all(name in overview() for name in listed())
    assert set(COMMANDS) - set(listed()) == {"worker"}
    for name in COMMANDS:
        assert command_class(name).__doc__, name


@pytest.mark.parametrize("name", [*COMMANDS, "settings"])
def test_the_options_known_to_suggestions_and_completion_are_those_tyro_reads(name: str, capsys) -> None:
    words = ["train", "--settings"] if name == "settings" else [name, "--help"]
    known = options_of(Config if name == "settings" else command_class(name))
    with pytest.raises(SystemExit):
        main(words)
    shown = re.findall(r"(?:^(?:│ |  )|, )(--?[a-z][\w.-]*)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(shown) == sorted(flag for option in (HELP, *known) for flag in option.flags)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "usage: skerry COMMAND"),
        (["trian"], "skerry: trian is not a command; did you mean train?\n"),
        (["qqqq"], "skerry: qqqq is not a command; skerry --help lists the commands\n"),
        (["syncer", "RUN", "--adress", "x:1"], "skerry: skerry syncer has no option --adress; did you mean --address?\n"),
        (["train", "--sync.evry", "12"], "skerry: skerry train has no option --sync.evry; did you mean --sync.every?\n"),
        (["train", "--every=12"], "skerry: skerry train has no option --every; did you mean --sync.every?\n"),
        (["create", "a.toml", "RUN", "--qqqq"], "no option --qqqq; skerry create --help lists its options\n"),
        (["close", "a:1", "--sync.every", "3"], "skerry: skerry close has no option --sync.every"),
        (["shard", "RUN"], "skerry: missing from skerry shard: SYNCER host:port of the syncer. --number INT"),
        (["syncer", "RUN", "another"], "skerry: unrecognized options: another; see skerry syncer --help\n"),
        (["syncer", "RUN", "--shards", "two"], "skerry: error parsing --shards: invalid literal for int()"),
        (["syncer", "RUN", "--address"], "skerry: missing value for argument '--address'"),
        (["train", "--sync.adopt", "keep"], "skerry: invalid choice 'keep' for argument '--sync.adopt'"),
        (
            ["train", "--sync.send", "fp7"],
            "skerry: sync.send must be one of fp32, bf16, fp8, int8, int4, e3m0, topk1, topk3, got 'fp7'",
        ),
        (["train", "--sync.every", "often"], "skerry: error parsing --sync.every: invalid literal for int()"),
        (["plan", "--params", "1b"], "skerry: skerry plan needs --island"),
        (["completion", "tcsh"], "skerry: invalid choice 'tcsh'"),
    ],
)
def test_a_wrong_command_line_gets_one_line_that_helps(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said
    assert not arguments or said.count("\n") == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_on_a_terminal_has_no_frame_or_colours(encoding: str, monkeypatch, capsys) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(SystemExit):
        main(["syncer"])
    assert capsys.readouterr().err == "skerry: missing from skerry syncer: RUN Run folder; see skerry syncer --help\n"


def test_settings_and_arguments_of_the_command_may_be_mixed() -> None:
    cls = command_class("train")
    assert issubclass(cls, JobCommand)
    words = "--proxy --sync.every 12 --data.suffixes .a .b --chaos p.toml --sync.outer_lr=0.7 job.toml --sync.no-wait x"
    own, settings = split(words.split(), options_of(cls), options_of(Config), "skerry train")
    assert own == ["--proxy", "--chaos", "p.toml", "job.toml", "x"]
    assert " ".join(settings) == "--sync.every 12 --data.suffixes .a .b --sync.outer_lr=0.7 --sync.no-wait"
    assert split(["--train.lr", "-1"], options_of(cls), options_of(Config), "skerry train") == ([], ["--train.lr", "-1"])
    assert split(["--", "--every"], options_of(cls), [], "skerry train") == (["--", "--every"], [])
    with pytest.raises(ConfigError, match="no option -x"):
        split(["-x"], options_of(cls), [], "skerry train")


def test_settings_are_listed_with_the_values_of_the_file(tmp_path: Path, capsys) -> None:
    (tmp_path / "job.toml").write_text("[sync]\nevery = 17\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "job.toml"), "--settings", "--sync.overlap", "3"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not ended.value.code and "merges of the same fragment. (default: 17)" in said


@pytest.mark.parametrize(
    "line, expected",
    [
        ("skerry tr", ["train"]),
        ("skerry re", ["resume", "restore", "replay"]),
        ("skerry train job.toml --sync.ev", ["--sync.every"]),
        ("skerry create job.toml run --sync.feedback a", ["auto", "always"]),
        ("skerry syncer runs/a --sh", ["--shards"]),
        ("skerry syncer runs/", []),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_bash_completes_commands_options_and_choices(tmp_path: Path, shell: str, line: str, expected: list[str]) -> None:
    """zsh gets the same script. Where it offers nothing, bash goes on to files."""
    script = tmp_path / "completion"
    script.write_text(skerry("completion", shell).stdout)
    words = line.split(" ")
    asked = f'source {script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n_skerry\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "--norc", "-eu", "-c", asked], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == expected
    registered = subprocess.run(
        ["bash", "--norc", "-c", f"source {script}; complete -p skerry"], capture_output=True, text=True
    )
    assert "-o default" in registered.stdout and "-F _skerry" in registered.stdout


def test_fish_is_told_every_command_and_option(capsys) -> None:
    main(["completion", "fish"])
    said = capsys.readouterr().out.splitlines()
    assert "complete -c skerry -n '__fish_seen_subcommand_from train' -l sync.every -r" in said
    assert "complete -c skerry -n '__fish_seen_subcommand_from ledger' -l json" in said
    assert sum("__fish_use_subcommand" in line for line in said) == len(listed())
    assert all(line.replace("\\'", "").count("'") % 2 == 0 for line in said), "a quote inside a quoted text"

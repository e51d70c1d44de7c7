"""Runs the command line in this process."""

import sys

from d2pfed.cli import main


def run_command(words, monkeypatch, capsys) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of `d2pfed` with these words."""
    monkeypatch.setattr(sys, "argv", ["d2pfed", *map(str, words)])
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code or 0
    return status, *capsys.readouterr()

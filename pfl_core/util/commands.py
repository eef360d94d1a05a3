"""What command lines are made of: words, their options, one line an error, exit codes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any

from pfl_core.util import checks


def no_check(args: Namespace, surplus: list[str], complain: Callable) -> None:
    """Nothing is to be checked before a word is done."""


class Words:
    """A command line whose words are functions do_WORD(args); their docstrings are the help.

    prog : how it is called
    package : who speaks in messages
    """

    def __init__(self, prog: str, description: str | None, package: str):
        self.package = package
        self.top = ArgumentParser(prog=prog, description=description)
        self._words = self.top.add_subparsers(dest="word", required=True, metavar="WORD")

    def add(self, do: Callable[[Namespace], int | None]) -> Callable:
        """Add a word; the function that adds an option to it."""
        name = do.__name__.removeprefix("do_").replace("_", "-")
        doc = do.__doc__
        sub = self._words.add_parser(name, help=doc, description=doc, allow_abbrev=False)
        sub.set_defaults(do=do, options=sub)
        return sub.add_argument

    def call(
        self,
        argv: Sequence[str],
        check: Callable[[Namespace, list[str], Callable], None] = no_check,
    ) -> int:
        """Do one word, after `check(args, options that it has not got, complain)`.

        0 if it worked, 1 with one line on stderr if it did not, 2 for wrong words, 130 for Ctrl-C.
        """
        args, surplus = self.top.parse_known_args(argv)
        complain = functools.partial(print, f"{self.package} {args.word}:", file=sys.stderr)
        try:
            check(args, surplus, complain)
            options = [o for o in args.options._option_string_actions if o.startswith("--")]
            for word in surplus:
                checks.known(f"option of {args.word}:", word.partition("=")[0], options)
            code = args.do(args) or 0
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # `... list | head`: the rest is not wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, ValueError, ImportError) as error:
            complain(error)
            return 2 if surplus else 1
        except KeyboardInterrupt as error:
            told = getattr(error, "__notes__", ["the same command goes on from what is kept"])
            complain("; ".join(["interrupted", *told]))
            return 130
        return 0


def several(add: Callable, name: str, said: str, kind: type = str, default: Any = ()) -> None:
    """An option of several values."""
    metavar = "N" if kind is int else "NAME"
    add(name, nargs="+", type=kind, default=list(default), metavar=metavar, help=said)


class Renamed(argparse.Action):
    """An option by its name of an earlier version."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Say the new name, and set it."""
        print(f"{option} is called --{self.dest} now; please write it so", file=sys.stderr)
        setattr(namespace, self.dest, True)

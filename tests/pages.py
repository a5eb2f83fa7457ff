"""How the tests read the code blocks of the pages, and put them into the scripts."""

import re
from textwrap import dedent, indent

from editing import ROOT

MINIMAL, LANGUAGE_MODEL = ((ROOT / "minimal" / f"{name}.py").read_text() for name in ("ddp", "language_model"))
LAUNCH = (ROOT / "ddp_launch_train.py").read_text()


def edits_of(*diffs):
    """Return diffs of the pages as edits. Lines with "..." part them."""
    hunks = [hunk for diff in diffs for hunk in re.split(r"(?m)^\.\.\.\n", diff)]
    return [["\n".join(re.findall(rf"(?m)^[ {sign}](.*)", hunk)) for sign in "-+"] for hunk in hunks]


def block(name):
    """Return the code after the comment `<!-- test: NAME -->` in one of the pages."""
    pages = "".join(page.read_text() for page in sorted(ROOT.glob("*.md")))
    [code] = re.findall(rf"<!-- test: {name} -->\n *```\w+\n(.*?) *```", pages, re.S)
    return dedent(code)


def at(place, *codes):
    """Return an edit that puts code in place of a line, with its indentation."""
    return place, indent("".join(codes), re.match(" *", place)[0])


def before(place, *codes):
    return place, at(place, *codes)[1] + place


def after(place, *codes):
    return place, place + at(place, *codes)[1]


def line(pattern, lines=1, text=MINIMAL):
    """Return the line of a script that has a pattern, and the lines after it."""
    [found] = re.findall(rf"(?m)^.*{pattern}.*\n" + ".*\n" * (lines - 1), text)
    return found


def pieces(name):
    """Return the parts of a block between empty lines."""
    return [piece.rstrip("\n") + "\n" for piece in block(name).split("\n\n")]


def said(code, page="RECIPES"):
    """Return code that stands in a sentence of a page."""
    assert f"`{code}`" in (ROOT / f"{page}.md").read_text().replace("\n", " "), code
    return code


EMA = edits_of(block("EMA"))  # of minimal/ddp.py

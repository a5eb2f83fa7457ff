"""README's silent errors: tests/mistakes.py makes each mistake, on two processes."""

import ast
import json
import re
import sys

import pytest
from conftest import ROOT, run

MISTAKES = ROOT / "tests" / "mistakes.py"
FUNCTIONS = [node for node in ast.parse(MISTAKES.read_text()).body if isinstance(node, ast.FunctionDef)]
FUNCTIONS = {node.name: ast.get_docstring(node) for node in FUNCTIONS if not node.args.args}
# A row that is seen where a notebook starts the training: first_runs in test_training.py.
NOTEBOOK = "functions replaced in an imported script"


def test_each_row_of_readmes_table_has_a_function_that_makes_the_mistake():
    section = (ROOT / "README.md").read_text().split("## What goes wrong without an error")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (.*?) \|", section)[1:]
    assert len(rows) > 20
    assert set(rows) == {NOTEBOOK, *"\n".join(filter(None, FUNCTIONS.values())).splitlines()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = run([*launcher, MISTAKES, folder], PYTHONHASHSEED="random")
    assert finished.returncode == 0, finished.stderr
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mistake_raises_no_error_and_is_wrong(name, seen):
    assert seen[name] == ["seen", "seen"]  # on both ranks

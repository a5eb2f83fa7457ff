"""TROUBLESHOOTING.md: two processes make each mistake without an error, and what the scripts say is quoted."""

import ast
import re

from conftest import ROOT, in_processes

MISTAKES = ROOT / "tests" / "mistakes.py"
PAGE = (ROOT / "TROUBLESHOOTING.md").read_text()
SEEN_ELSEWHERE = "Functions are replaced in an imported script."  # first_runs in test_training.py


def test_two_processes_make_each_mistake_of_the_page(tmp_path):
    functions = [node for node in ast.parse(MISTAKES.read_text()).body if isinstance(node, ast.FunctionDef)]
    rows = {node.name: ast.get_docstring(node) for node in functions if not node.args.args}
    rows = {name: rows_of_one.splitlines() for name, rows_of_one in rows.items() if rows_of_one}
    section = PAGE.split("\n## Mistakes without an error")[1].split("\n## ")[0]
    of_page = re.findall(r"^- \*\*(.*?)\*\*", section, re.M | re.S)
    assert len(of_page) > 20
    assert sorted(" ".join(row.split()) for row in of_page) == sorted([SEEN_ELSEWHERE, *sum(rows.values(), [])])
    finished = in_processes(2, tmp_path, MISTAKES)
    assert finished.returncode == 0
    assert sorted(re.findall(r"^seen (\w+)", finished.stdout, re.M)) == sorted([*rows, *rows])  # on both ranks


def test_the_page_quotes_the_sentences_that_end_a_run():
    sentences = dict(ddp_launch_train="the weights of the processes differ")
    sentences["minimal/ddp"] = "the weights of the ranks differ"
    for script, sentence in sentences.items():
        assert sentence in (ROOT / f"{script}.py").read_text() and f"`{sentence}`" in PAGE

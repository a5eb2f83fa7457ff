"""The files as a reader sees them: numbered comments, diffs between scripts, README's commands."""

import difflib
import importlib
import re
import shlex
import subprocess

import pytest
from conftest import ROOT, SCRIPTS
from torch.distributed.run import get_args_parser

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_numbered_comments_have_no_gap(script):
    text = (ROOT / f"{script}.py").read_text()
    found = {}
    for tag, number, of in re.findall(r"# \[(\w+) (\d+)/(\d+)\] \S", text):
        found.setdefault((tag, int(of)), []).append(int(number))
    assert len(found) == (2 if script == "apex_amp_train" else 1)
    for (_, of), numbers in found.items():
        assert sorted(numbers) == list(range(1, of + 1))
        assert len({tag for tag, _ in found}) == len(found)  # one total per tag


def test_readme_names_numbered_comments_that_are_there():
    scripts = "".join((ROOT / f"{script}.py").read_text() for script in SCRIPTS)
    named = re.findall(r"\[[A-Z]+ \d+/\d+\]", README)
    assert named and all(f"# {name} " in scripts for name in named)


def test_readme_names_tests_files_and_headings_that_are_there():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)(\.\.\.)?`", README)
    for name, more in named:
        found = f"def {name}" if more else f"def {name}("
        assert found in tests or (ROOT / "tests" / f"{name}.py").exists(), name
    links = re.findall(r"\]\(([^)]+)\)", README)
    titles = [line for line in README.lower().splitlines() if line.startswith("#")]
    headings = {re.sub(r"[^\w -]", "", title).strip().replace(" ", "-") for title in titles}
    assert len(named) > 15 and len(links) > 10
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        else:
            assert link.startswith("https://") or (ROOT / link).exists(), link


# Changed lines (both sides), with the numbered comments that each technique adds, and a little room.
@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        ("dp_train", "ddp_launch_train", 150),
        ("ddp_launch_train", "ddp_spawn_train", 62),
        ("ddp_launch_train", "apex_amp_train", 177),
    ],
)
def test_diffs_show_the_technique_and_little_else(one, other, most):
    one, other = ((ROOT / f"{name}.py").read_text().splitlines() for name in (one, other))
    changed = [line for line in difflib.unified_diff(one, other, n=0) if re.match(r"[+-](?![+-]{2} )", line)]
    assert len(changed) <= most


def test_scripts_have_the_same_sections_and_flags_in_the_same_order():
    sections, flags = [], []
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text()
        sections.append(re.findall(r"# -{20,} (.+)", text))
        flags.append(re.findall(r'add\("(--[a-z-]+)"', text))
    assert all(found == sections[0] for found in sections)
    assert sections[0] == ["Setup", "Data", "Model and optimizer", "Train", "Validate", "Save"]
    shared = [flag for flag in flags[0] if flag != "--precision"]
    assert shared == [f for f in flags[3] if f in shared] == [f for f in flags[1] if f in shared]
    assert shared == [f for f in flags[2] if f in shared]


def commands():
    """Return the command lines of README's bash blocks, but for the script among them (which test_machines.py runs)."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = "\n".join(block for block in blocks if not block.startswith("#!")).replace("\\\n", " ").splitlines()
    lines = [line.partition(" # ")[0].strip() for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def test_readme_has_the_two_commands_and_only_valid_bash():
    assert {"bash run_all.sh", "bash run_all.sh test"} <= set(commands())
    for line in commands():
        assert subprocess.run(["bash", "-n", "-c", line], capture_output=True).returncode == 0, line


@pytest.mark.parametrize("line", [line for line in commands() if re.search(r"_train\.py|run_all\.sh", line)])
def test_readme_commands_parse(line, monkeypatch):
    words = shlex.split(line)
    if any(word in ("cp", "grep", "diff") for word in words):
        return
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "torchrun" or words[:3] == ["python", "-m", "torch.distributed.run"]:
        parsed = get_args_parser().parse_args(words[1 if words[0] == "torchrun" else 3 :])
        words = ["python", parsed.training_script, *parsed.training_script_args]
    name = words[1].removesuffix(".py")
    if words[:2] == ["bash", "run_all.sh"]:
        if words[2:3] == ["test"]:
            return
        name = "dp_train"
    assert words[0] in ("python", "bash") and name in SCRIPTS, line
    module = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, *words[2:]])
    module.parse_args()

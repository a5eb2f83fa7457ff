"""The files as a reader sees them: their size, the order of their parts, differences, and README's commands."""

import ast
import importlib
import re
import subprocess

import pytest
from conftest import ROOT, SCRIPTS
from torch.distributed.run import get_args_parser

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
TEXTS = {path.name: path.read_text() for path in [*ROOT.glob("*.py"), ROOT / "run_all.sh"]}
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").glob("*.py")}
MOST_LINES = {"dp_train.py": 245, "ddp_launch_train.py": 265, "ddp_spawn_train.py": 275, "apex_amp_train.py": 375}
MOST_LINES |= {"common.py": 120, "run_all.sh": 150, "README.md": 260, "all tests": 1400}
MOST_CHANGES = {"dp to ddp_launch": 110, "ddp_launch to ddp_spawn": 45, "ddp_launch to apex_amp": 150}
REPLACED = "load_data build_network build_optimizer compute_loss validate metrics_from".split()
ORDER = ["main", *REPLACED, "train_epoch", "report"]
ORDER += ["save_atomically", "save_checkpoint", "load_checkpoint", "parse_args"]
# The commands of README, and of the texts at the top of the scripts, that start a script.
COMMANDS = [text.split('"""')[1] for name, text in TEXTS.items() if name.endswith(".py")]
COMMANDS = "\n".join(COMMANDS + [block for kind, block in BLOCKS if kind == "bash"]).replace("\\\n", " ")
START = r"(?m)^ *(?:[A-Z_]+=\S+ +)*((?:python|torchrun|bash) .*(?:_train\.py|run_all\.sh).*?) *(?: #.*)?$"
COMMANDS = sorted(set(re.findall(START, COMMANDS)))


def test_files_functions_and_lines_stay_short():
    texts = TEXTS | {"README.md": README, "all tests": "".join(TESTS.values())}
    counts = {name: text.count("\n") for name, text in texts.items()}
    long = [(name, count) for name, count in counts.items() if count > MOST_LINES[name]]
    for name, text in [*TEXTS.items(), *TESTS.items()]:
        long += [(name, number) for number, line in enumerate(text.splitlines(), 1) if len(line) > 115]
        tree = ast.walk(ast.parse(text if name.endswith(".py") else ""))
        long += [f.name for f in tree if isinstance(f, ast.FunctionDef) and f.end_lineno - f.lineno >= 85]
    assert not long


def test_two_scripts_differ_in_little_and_have_their_flags_in_the_same_order():
    for names, most in MOST_CHANGES.items():
        files = [f"{name}_train.py" for name in names.split(" to ")]
        diff = subprocess.run(["diff", *files], cwd=ROOT, capture_output=True, text=True).stdout
        assert 0 < len(re.findall("(?m)^[<>]", diff)) <= most, names
        one, other = (re.findall(r'add\("(--[a-z-]+)"', TEXTS[name]) for name in files)
        assert [flag for flag in one if flag in other] == [flag for flag in other if flag in one] != []


@pytest.mark.parametrize("script", SCRIPTS)
def test_parts_come_in_the_agreed_order(script):
    text = TEXTS[f"{script}.py"]
    for tag in dict(dp_train=["DP"], apex_amp_train=["DDP", "AMP"]).get(script, ["DDP"]):
        found = re.findall(rf"# \[{tag} (\d+/\d+)\] ", text)
        assert found == [f"{number}/{len(found)}" for number in range(1, len(found) + 1)] != []
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    assert [name for name in functions if name not in ("launch", "use_other_level")] == ORDER
    first = re.findall(r"\n\n\n# -{60} (?:Replace these|Training and) .+\n\n\n(?:def|class) (\w+)", text)
    assert first == [ORDER[1], ORDER[7]]
    replaced = "".join(ast.get_source_segment(text, functions[name]) for name in REPLACED)
    assert not re.findall(r"dist\b|distributed|rank|world_size|DDP", replaced)


def test_readme_names_only_what_is_there():
    links = re.findall(r"\]\((?!https://)([^)#]*)", README)
    files = re.findall(r"`([\w/.-]+\.(?:py|sh|md|txt|toml))`", README)
    wrong = [name for name in links + files if not (ROOT / name).exists()]
    comments = "".join(TEXTS.values())
    wrong += [name for name in re.findall(r"\[[A-Z]+ \d+/\d+\]", README) if f"# {name} " not in comments]
    assert links and files and not wrong


def test_diffs_of_readme_are_lines_of_the_scripts():
    section = README.partition("## From one GPU")[2].partition("\n## ")[0]
    diffs = re.findall(r"```diff\n(.*?)```", section, re.S)
    for diff, names in zip(diffs, MOST_CHANGES, strict=True):
        one, other = (set(TEXTS[f"{name}_train.py"].splitlines()) for name in names.split(" to "))
        lines = dict.fromkeys("+-", set()) | {sign: set(re.findall(rf"(?m)^\{sign}(.*)", diff)) for sign in "+-"}
        assert lines["-"] <= one - other and lines["+"] <= other - one, diff


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line, monkeypatch):
    words = line.split()
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        words = ["torchrun", parsed.training_script, *parsed.training_script_args]
        for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split():
            monkeypatch.setenv(name, "0")
    module = importlib.import_module(words[1].replace("run_all.sh", "dp_train.py").removesuffix(".py"))
    module.parse_args([word for word in words[2:] if word not in ("test", "apex")])

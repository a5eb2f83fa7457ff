"""Mixed precision: which Apex is taken, what is refused, and what a step that overflows leaves behind."""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, ROOT, SMALL, command, edited, result, run

import apex_amp_train

ONE = [*SMALL, "--epochs", "1"]
# Stand-ins that look, in what matters, like the packages that people have under the name "apex": the files in them.
PACKAGES = {
    "none": {},
    "25.04": {"__init__": "", "amp/__init__": "", "parallel/__init__": "", "normalization/__init__": ""},
    "25.07": {"__init__": "", "optimizers/__init__": "", "normalization/__init__": ""},
    "unrelated": {"__init__": "import a_package_that_is_not_here", "lib/__init__": ""},
    "folder": {"README": "a folder called apex beside the script"},
    "broken": {"__init__": "", "amp/__init__": "import torch.gone", "parallel/__init__": ""},
}
REFUSED = {  # and what is said of each where there is no GPU
    "none": "NVIDIA Apex is not installed; install Apex's tag 25.04 as README says",
    "25.04": "NVIDIA Apex needs a GPU; install Apex's tag 25.04",
    "25.07": "this NVIDIA Apex is too new: amp and parallel left it after tag 25.04; install Apex's tag 25.04",
    "unrelated": "the installed apex is not NVIDIA's but another package of that name; install Apex's tag 25.04",
    "folder": "the installed apex is not NVIDIA's but another package of that name; install Apex's tag 25.04",
    "broken": "NVIDIA Apex cannot be imported (No module named 'torch.gone'); install Apex's tag 25.04",
}


def put_apex(folder, package):
    """Write a stand-in for Apex into a folder for PYTHONPATH; return the folder."""
    for name, text in PACKAGES[package].items():
        path = folder / "apex" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture
def parse(tmp_path, monkeypatch, capsys):
    """Return a function that parses flags with a stand-in for Apex installed, and gives (args, exit code, stderr)."""

    def parse_with(package, *flags, cuda=False):
        without = [path for path in sys.path if not Path(path, "apex").exists()]
        monkeypatch.setattr(sys, "path", without)  # where the real one is installed
        monkeypatch.syspath_prepend(put_apex(tmp_path, package))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
        monkeypatch.setattr("sys.argv", ["apex_amp_train.py", *ONE, "--device", "cuda" if cuda else "cpu", *flags])
        args, code = None, 0
        try:
            args = apex_amp_train.parse_args()
        except SystemExit as end:
            code = end.code
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]
        return args, code, capsys.readouterr().err

    return parse_with


@pytest.mark.parametrize("flag", ["--backend", "--ddp"])
@pytest.mark.parametrize("package", REFUSED)
def test_an_apex_that_cannot_be_used_is_refused(package, flag, parse):
    _, code, said = parse(package, flag, "apex")
    assert code == 2 and said.count("\n") == 1 and said.startswith("apex_amp_train.py: ")
    assert REFUSED[package] in said and "use --backend torch --ddp torch" in said


@pytest.mark.parametrize("package", REFUSED)
def test_auto_takes_torch_and_says_why(package, parse):
    args, code, _ = parse(package)
    assert (code, args.backend, args.ddp) == (0, "torch", "torch")
    assert args.reason in REFUSED[package]


def test_auto_takes_apex_where_it_is_and_a_gpu_too(parse):
    args, code, _ = parse("25.04", cuda=True)
    assert (code, args.backend, args.ddp) == (0, "apex", "torch")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--opt-level", "O2", "--sync-bn"], "--sync-bn with O2 needs Apex built with --cuda_ext"),
        (["--opt-level", "O2", "--backend", "torch"], "use --opt-level O1"),
        (["--compile"], "--compile cannot follow what Apex does"),
        (["--compile", "--backend", "torch", "--ddp", "apex"], "--compile cannot follow what Apex does"),
        (["--opt-level", "O4"], "--help lists the flags"),
        (["--ddp", "dp"], "--help lists the flags"),
    ],
)
def test_what_apex_cannot_do_is_refused(flags, sentence, parse):
    _, code, said = parse("25.04", *flags, cuda=True)
    assert code == 2 and sentence in said


def test_a_run_says_which_backend_and_why(tmp_path):
    arguments = [sys.executable, str(ROOT / "apex_amp_train.py"), *ONE, "--device", "cpu", "--opt-level", "O0"]
    finished = run(arguments, PYTHONPATH=put_apex(tmp_path, "25.07"))
    assert (result(finished)["backend"], result(finished)["ddp"]) == ("torch", "torch")
    assert "mixed precision O0 by torch (this NVIDIA Apex is too new: amp and parallel left" in finished.stdout
    refused = run([*arguments, "--backend", "apex"], PYTHONPATH=put_apex(tmp_path, "25.07"))
    assert refused.returncode == 2 and "RESULT" not in refused.stdout and refused.stderr.count("\n") == 1


def test_a_checkpoint_of_another_level_or_backend_is_refused(tmp_path):
    flags = [*ONE, "--device", "cpu", "--checkpoint", str(tmp_path / "run.pt"), "--opt-level", "O0"]
    kind = dict(arch="resnet18", image_size=8, batch_size=12, lr=0.02, opt_level="O0", backend="torch")
    for other in dict(opt_level="O1"), dict(backend="apex"):
        torch.save(kind | other, tmp_path / "run.pt")
        finished = run([sys.executable, str(ROOT / "apex_amp_train.py"), *flags])
        [(name, value)] = other.items()
        sentence = f"(it has --{name.replace('_', '-')} {value}); give its run's flags or another FILE"
        assert finished.returncode == 2 and sentence in finished.stderr, finished.stderr


# A scale at which nothing overflows by itself.
SCALE = ("torch.amp.GradScaler(device.type, ", "torch.amp.GradScaler(device.type, init_scale=256, ")


def test_a_first_step_that_overflows_is_skipped_and_nothing_else(tmp_path):
    # Against an optimizer that does not know of the scaler: it is not called at all for the step that is skipped.
    infinite = [
        ("amp.backward(loss, opt", "amp.backward(loss * (float('inf') if done == 0 else 1), opt"),
        SCALE,
    ]
    plain = [("nesterov=True, fused=True", "nesterov=True, foreach=True")]
    losses = []
    for name, changes in ("fused", infinite), ("plain", infinite + plain):
        folder = edited(tmp_path / name, "apex_amp_train", *changes)
        flags = [*SMALL, "--image-size", "4", "--epochs", "2", "--limit", "24", "--device", DEVICE]
        flags += ["--backend", "torch", "--checkpoint", str(folder / "run.pt")]
        finished = run(command("apex_amp_train", *flags, nproc=1, folder=folder))
        result(finished)
        losses.append([float(loss) for loss in re.findall(r"step \d/2 loss (\S+)", finished.stdout)])
        saved = torch.load(folder / "run.pt", weights_only=True)
        assert saved["amp"]["scale"] == 128  # halved once
        assert all(weight.isfinite().all() for weight in saved["model"].values())
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=0.02)  # float16 rounds


@pytest.mark.parametrize("script", ["dp_train", "apex_amp_train"])
def test_clipped_gradients_have_the_norm_asked_for(script, tmp_path):
    # The first step of plain SGD moves the weights by learning rate times norm, here 1 / 1.2 (warm-up) times 0.125.
    train, val = "        net.train(not", "        net.eval()\n"
    moved = "sum(((a - b) ** 2).sum() for a, b in zip(trainable, before, strict=True)).item() ** 0.5"
    changes = [
        ("momentum=0.9, weight_decay=5e-4, nesterov=True, ", ""),
        (train, "        before = [p.detach().clone() for p in trainable]\n" + train),
        (val, f"        print('MOVED', {moved})\n" + val),
    ]
    folder = edited(tmp_path / script, script, *changes, *([SCALE] if script == "apex_amp_train" else []))
    flags = [*SMALL, "--epochs", "1", "--limit", "12", "--lr", "1", "--clip-grad", "0.125", "--device", "cpu"]
    finished = run([sys.executable, str(folder / f"{script}.py"), *flags])
    result(finished)
    assert float(re.search(r"MOVED (\S+)", finished.stdout)[1]) == pytest.approx(0.125 / 1.2, rel=2e-3)


def states(script, folder, flags):
    """Run two processes; return the sum of all weights and buffers that each of them validates with."""
    line, both = "        net.eval()\n", "[*net.parameters(), *net.buffers()]"
    say = f"        print('STATE', sum(x.double().sum().item() for x in {both}), force=True)\n"
    folder = edited(folder, script, (line, say + line))
    finished = run(command(script, *ONE, *flags, folder=folder))
    result(finished)
    found = re.findall(r"STATE (\S+)", finished.stdout)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("script", ["ddp_launch_train", "apex_amp_train"])
def test_all_processes_validate_with_the_same_network(script, tmp_path):
    flags = ["--device", "cpu", *(["--opt-level", "O0"] if script == "apex_amp_train" else [])]
    assert len(set(states(script, tmp_path / "edited", flags))) == 1

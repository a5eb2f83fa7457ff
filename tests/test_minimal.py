"""minimal/: README shows its diff, both programs learn, and ddp.py does right what a port often does wrong."""

import re

import pytest
import torch
from conftest import run, train_minimal
from editing import IMAGES, ROOT, SMALL_MINIMAL, edited
from pages import EMA, MINIMAL, after, before, block, edits_of, line


def test_readme_shows_the_diff_of_the_two_programs():
    files = ROOT / "minimal" / "one_gpu.py", ROOT / "minimal" / "ddp.py"
    diff = run(["diff", "-U", "999", *files]).stdout.split("\n", 3)[3]
    assert f"```diff\n{diff}```\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["by_steps", "language_model", "text_classifier"])
def test_the_other_scripts_have_the_steps_of_the_port(name):
    text = (ROOT / "minimal" / f"{name}.py").read_text()
    connect = MINIMAL[MINIMAL.index("    # 1. ") : MINIMAL.index("    torch.manual_seed(21)\n")]
    for lines in connect, line("set_epoch"), line("same_weights"), "torch.manual_seed(21 + rank":
        assert lines in text


UNLIKE = after(line("loss.backward"), "model[2].running_mean += rank\n")  # statistics that differ between ranks
AVERAGED = [UNLIKE, *[(old, new.replace("0.99", "0.95")) for old, new in EMA]]


@pytest.mark.parametrize("nproc, edits", [(0, []), (1, []), (2, []), (3, []), (2, [UNLIKE]), (3, AVERAGED)])
def test_the_programs_learn_and_print_the_accuracy_of_the_model_that_they_save(nproc, edits, tmp_path):
    finished = train_minimal(nproc, tmp_path, *edits)
    assert finished.returncode == 0
    printed = [float(accuracy) for accuracy in re.findall(r"epoch \d accuracy (\S+)", finished.stdout)]
    assert len(printed) == 4 and printed[-1] > 0.3  # four epochs, each printed once
    scope = dict(torch=torch, nn=torch.nn)
    exec(f"{IMAGES}\nmodel = {SMALL_MINIMAL['models.resnet50(num_classes=10)']}.eval()", scope)
    images, labels = scope["small_images"](61).tensors
    scope["model"].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    accuracy = (scope["model"](images).argmax(1) == labels).double().mean().item()
    assert printed[-1] == pytest.approx(accuracy, abs=5e-5)  # of the saved weights, each image counted once


def test_of_two_machines_rank_0_alone_prints_and_saves_and_both_validate_its_model(tmp_path):
    own_folder = after(line("world_size = int"), "os.mkdir(f'machine {rank}')\nos.chdir(f'machine {rank}')\n")
    say = "print(f'SEED {torch.initial_seed()} MEAN {model[2].running_mean.sum()}\\n', end='')\n"
    say = after(line("all_reduce"), say)
    finished = train_minimal(2, tmp_path, ('int(os.environ["LOCAL_RANK"])', "0"), own_folder, say)
    assert finished.returncode == 0 and finished.stdout.count("accuracy") == 4
    seeds, means = zip(*re.findall("SEED (.*) MEAN (.*)", finished.stdout))
    assert len(seeds) == 8 and len(set(seeds)) == 2 and len(set(means)) == 4  # of 2 ranks, and of 4 epochs
    assert [path.parent.name for path in tmp_path.glob("machine */model.pt")] == ["machine 0"]


def test_training_with_model_ends_with_an_error_and_saves_nothing(tmp_path):
    finished = train_minimal(2, tmp_path, ("(ddp_model(images)", "(model(images)"), ("lr=1e-3", "lr=1e-5"))
    assert finished.returncode != 0 and "the weights of the ranks differ" in finished.stdout
    assert "accuracy" not in finished.stdout and not (tmp_path / "model.pt").exists()


def test_one_process_downloads_while_the_others_wait(tmp_path):
    make = before("    torch.manual_seed(21)\n", """import time
made = datasets.CIFAR10
def make(*_, train, download=False, **__):
    if download:  # mkdir() fails while another process downloads
        os.mkdir("downloading"), time.sleep(0.5), os.rmdir("downloading")
    return made(train=train)
datasets.CIFAR10 = make
""")
    assert train_minimal(2, tmp_path, make, epochs=1).returncode == 0


def test_three_checks_pass_and_see_a_missing_sampler(tmp_path):
    # Forked processes share the seed of NumPy.
    numpy = after(line(r"21 \+ rank"), "__import__('numpy').random.seed(rank)\n")
    checks = [numpy, *edits_of(block("three checks"))]
    finished = train_minimal(2, tmp_path, *checks)
    assert finished.returncode == 0
    finished = train_minimal(2, tmp_path, *checks, ("batch_size, sampler=sampler", "batch_size, shuffle=True"))
    assert finished.returncode != 0 and "410 images come twice: not shared?" in finished.stdout
    no_broadcast = ("dist.broadcast(buffer, src=0)", "pass")
    assert "in '2.running_mean'" in train_minimal(2, tmp_path, *checks, UNLIKE, no_broadcast).stdout
    same = "checks.same_on_all_ranks(ema.module.state_dict())"
    of_ema = before(line("model.eval").replace("model", "ema.module"), same, "\n")
    assert train_minimal(2, tmp_path, *AVERAGED, of_ema).returncode == 0
    no_broadcast = (", *ema.module.buffers()]", "]")
    assert "in '2.running_mean'" in train_minimal(2, tmp_path, *AVERAGED, of_ema, no_broadcast).stdout


def test_the_port_is_compared_with_the_old_script_and_one_process_with_several(tmp_path):
    program = (ROOT / "minimal" / "compare_port.py").read_text()
    changed = edited(MINIMAL, *edits_of(block("compare")))
    assert changed.split('"""', 2)[2] == program.split('"""', 2)[2]  # the same but for the docstring
    diff = run(["diff", *(ROOT / "minimal" / f"{name}.py" for name in ("one_gpu", "compare_old"))]).stdout
    assert len(re.findall("(?m)^[<>]", diff)) == 19  # so who changes one_gpu.py changes compare_old.py

    def compare(nproc, *edits, folder=tmp_path):
        name = "compare_port" if nproc else "compare_old"
        return train_minimal(int(nproc), folder, ("range(101)", "range(61)"), *edits, images=60, name=name)

    stubs = 'python() { echo 0; }\ntorchrun() { echo "$2" | grep -o "[0-9]"; }\n'
    numbers = run(["bash", "-c", stubs + block("compare commands")], cwd=tmp_path).stdout.split()
    assert numbers == ["0", "1", "2"] and not any(compare(int(nproc)).returncode for nproc in [*numbers, 3])
    assert {path.stem: len(path.read_text().splitlines()) for path in tmp_path.glob("*.txt")} == {
        "loss.check": 10, "gradient.check": 10, "correct.check": 2}
    loss = ("), labels)", "), labels, torch.arange(10.0))")
    for edit, name in (loss, "gradient"), (("range(rank", "range(0"), "correct"):
        assert f"{name}, call 1: " in compare(3, edit).stdout
    other_weights = ("manual_seed(21)\n", "manual_seed(2)\n")
    assert "loss, call 1: " in compare(1, other_weights, ("checks.same_gradient(model)", "pass")).stdout
    sgd, clip = ("AdamW", "SGD"), "nn.utils.clip_grad_norm_(model.parameters(), {})\n"
    limits = "0.01", "0.01 * world_size"
    of_one, of_all = (before(line("optimizer.step"), clip.format(limit)) for limit in limits)
    assert not any(compare(nproc, sgd, of_one, folder=tmp_path / "clipped").returncode for nproc in (0, 1, 2))
    assert "gradient, call 2: " in compare(2, sgd, of_all, folder=tmp_path / "clipped").stdout

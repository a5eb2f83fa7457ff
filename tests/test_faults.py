"""What breaks a run: Ctrl-C, kills, NaN, a full disk, a broken checkpoint, wrong flags, weights that differ."""

import os
import re
import signal

import pytest
import torch
from conftest import GPUS, ON_GPUS, await_end, command, in_group, in_processes, result, run, train
from editing import SCRIPTS, SMALL_MODEL, copy_script
from pages import before, block


def addresses_of(pids):
    """Return the addresses, as in /proc/net/tcp, at which some processes listen for connections."""
    links = run(["find", *(f"/proc/{pid}/fd" for pid in pids), "-printf", "%l "]).stdout
    rows = [line.split() for line in run(["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}] " in links}


def train_until_epoch_2(start, folder, script, **env):
    """Start a run that would not end. Return its process, and the ids of this process and of its ranks."""
    flags = ["--epochs", "100000", "--workers", "1", "--checkpoint", f"{folder}/run.pt"]
    pause = before("        train_sums = Counter()", "time.sleep(0.1)\n")  # leaves the CPU to other tests
    arguments = command(script, *flags, folder=copy_script(folder, script, SMALL_MODEL, pause))
    process, log = start(arguments, "epoch 2 train_loss", **env)
    ranks = sorted(re.findall(r"(rank \d+: |)process (\d+) on", log.read_text()))
    return process, [process.pid, *(int(pid) for _, pid in ranks)]


def test_a_second_run_on_a_checkpoint_is_refused_and_the_first_trains_on_until_ctrl_c(start, tmp_path):
    torchrun, pids = train_until_epoch_2(start, tmp_path, "ddp_launch_train")
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL, ("timeout=30", "timeout=3"))  # seconds
    assert "run.pt.lock' could not be acquired" in train(tmp_path, 1).stdout
    assert all(os.path.exists(f"/proc/{pid}/exe") for pid in pids)
    os.killpg(torchrun.pid, signal.SIGINT)  # as a terminal does
    await_end(pids)
    assert torchrun.wait() != 0


def test_a_spawn_run_listens_on_loopback_alone_and_an_ides_stop_button_ends_it(start, tmp_path):
    parent, pids = train_until_epoch_2(start, tmp_path, "ddp_spawn_train", GLOO_SOCKET_IFNAME="eth9")  # ignored
    assert addresses_of(pids[1:]) == {"0100007F"}  # 127.0.0.1
    os.kill(parent.pid, signal.SIGINT)  # the parent alone: a terminal sends it to the children as well
    await_end(pids)
    assert parent.wait() != 0


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("script", ["ddp_launch_train", "ddp_spawn_train"])
@pytest.mark.parametrize("sent", ["SIGINT", "SIGKILL"])
def test_ctrl_c_or_a_killed_process_ends_all_on_gpus(script, sent, start, tmp_path):
    process, pids = train_until_epoch_2(start, tmp_path, script, **ON_GPUS)
    os.killpg(process.pid, signal.SIGINT) if sent == "SIGINT" else os.kill(pids[2], signal.SIGKILL)  # rank 1
    await_end(pids)
    assert process.wait() != 0


# Each fault strikes in epoch 2: errors on one rank, unequal weights, NaN, a full disk, a value of no safe type.
# apex_amp_train.py has these lines of ddp_launch_train.py, so only its own faults strike it.
FAULTS = [
    (SCRIPTS[1:2], "if rank == 1: raise OSError('no such file')", "no such file"),
    (SCRIPTS[1:3], "if rank == 1: raise SystemExit('no such file')", "no such file"),
    (SCRIPTS[1:3], "model[4].weight.data += rank", "the weights of the processes differ"),
    (SCRIPTS[::3], "if step == steps: model[4].weight.data[0, 0] = math.nan", "val_loss is nan: --lr is too"),
    (SCRIPTS[1:2], "if rank == 1: sums['loss'] *= math.inf", "train_loss is inf: .* divided by a count of 0"),
    (["ddp_spawn_train"], "if rank == 1: os.kill(os.getpid(), 9)", "process 1 terminated with signal SIGKILL"),
    (["apex_amp_train"], "scaler.update(1e-4)", "the loss scale is near 0"),  # as after NaN in each step
    (["dp_train"], "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (4096,) * 2)", "large|failed|iostream"),
    (["dp_train"], "optimizer.param_groups[0]['lr'] = common.np.float64(0.01)", "Weights only load failed"),
]
FAULTS = [(script, fault, message) for scripts, fault, message in FAULTS for script in scripts]


@pytest.mark.parametrize(("script", "fault", "message"), FAULTS)
def test_after_a_fault_the_last_checkpoint_stays(script, fault, message, tmp_path):
    line, in_epoch_2 = "            train_sums.update(sums)", "            if epoch == 2:\n                "
    folder = copy_script(tmp_path, script, SMALL_MODEL, (line, f"{in_epoch_2}{fault}\n{line}"))
    finished = train(folder, 2, script=script, TORCHELASTIC_ERROR_FILE="error.json")
    assert finished.returncode != 0 and re.search(message, finished.stdout)
    if "OSError" in fault:
        assert (tmp_path / "error.json").exists()  # from which torchrun prints the traceback
    assert torch.load(tmp_path / "run.pt", weights_only=True)["epoch"] == 1
    torch.load(tmp_path / "run.pt.best", weights_only=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_user_types_wrongly_is_said_in_one_sentence(script, monkeypatch, capsys):
    torchrun = script in ("ddp_launch_train", "apex_amp_train")

    def said(*flags, launcher=torchrun):
        monkeypatch.setenv("LOCAL_RANK", "0") if launcher else monkeypatch.delenv("LOCAL_RANK", raising=False)
        with pytest.raises(SystemExit):
            __import__(script).parse_args(flags)
        return "".join(capsys.readouterr())

    assert f"start this script {'with' if torchrun else 'without'} torchrun: " in said(launcher=not torchrun)
    sentences = {"--help": "peak learning rate", "--check run.pt": "unrecognized arguments"}  # no abbreviations
    sentences |= dict.fromkeys(["--synthetic 0", "--image-size 0", "--epochs 0", "--batch-size -1"], "at least 1")
    if script == "apex_amp_train":
        sentences |= {"--backend apex": "needs a GPU, NVIDIA Apex", "--opt-level O2": "is for --backend apex"}
    for flags, sentence in sentences.items():
        assert sentence in said(*flags.split())


def test_a_batch_size_that_does_not_fit_is_refused_and_the_default_fits_any_number_of_processes(tmp_path):
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL)
    assert "at most 61, and divisible by 2 processes" in train(tmp_path, 2, "--batch-size", "13").stdout
    copy_script(tmp_path, "dp_train", SMALL_MODEL)
    assert "at most 61\n" in train(tmp_path, 0, "--batch-size", "62", script="dp_train").stdout
    for nproc, script, batch_size in (0, "dp_train.py", 1024), (3, "ddp_launch_train.py", 1023):
        default = in_processes(nproc, tmp_path, script, *"--synthetic 1024 --image-size 4 --epochs 1".split())
        assert result(default)["batch_size"] == batch_size


# What a search on each rank, a launcher on each machine, or a `set` of weights may make different.
ORDER = "torch.optim.SGD(list(model.parameters())[::{}], lr"
DIFFERENT = {
    "steps: [5, 4]": ("steps = len(train_loader)", "steps = len(train_loader) - rank"),
    "seed: [21, 22]": before("    common.seed_everything(args.seed)  #", "args.seed += rank\n"),
    "val_size: [61, 60]": before("    args.batch_size = ", "val_set = val_set[rank:]\n"),
    "train_size: [61, 60]": before("    args.batch_size = ", "train_set = train_set[rank:]\n"),
    "weight_order: [[[16, ": ("torch.optim.SGD(model.parameters(), lr", ORDER.format("1 - 2 * dist.get_rank()")),
}


@pytest.mark.parametrize("script", SCRIPTS[1:3])
def test_settings_that_differ_between_processes_or_after_a_resume_or_need_a_gpu_end_the_run(script, tmp_path):
    for difference, edit in DIFFERENT.items():
        finished = train(copy_script(tmp_path, script, SMALL_MODEL, edit), 2, script=script)
        assert finished.returncode != 0 and f"the processes need the same {difference}" in finished.stdout
    sync_bn = train(copy_script(tmp_path, script, SMALL_MODEL), 2, "--sync-bn", script=script)
    assert "SyncBatchNorm layers only work with GPU modules" in sync_bn.stdout
    train(tmp_path, 2, "--epochs", "1", script=script)
    copy_script(tmp_path, script, SMALL_MODEL, ("torch.optim.SGD(model.parameters(), lr", ORDER.format(-1)))
    assert "run.pt has weight_order=[[16, " in train(tmp_path, 2, "--epochs", "1", script=script).stdout


def test_weights_of_all_kinds_are_compared_on_all_ranks_but_for_rounding(tmp_path):
    copy_script(tmp_path, "ddp_launch_train")
    in_group(2, tmp_path, """
from ddp_launch_train import weights_differ

def differ(weight):
    groups = [dict(params=nn.Parameter(values, requires_grad=False)) for values in (torch.ones(2), weight)]
    return weights_differ(torch.optim.SGD(groups), "cpu")

generator = torch.Generator().manual_seed(1)
weight, noise = torch.randn(2, 30, 4, generator=generator)
imaginary, uint8 = weight * 1j, torch.arange(99, dtype=torch.uint8)
for kind in weight, weight.T, weight.double(), weight.half(), imaginary, uint8, torch.zeros(3):
    assert differ(kind + rank) and not differ(kind)
assert differ(imaginary * (1 + rank)) and differ(weight * (1 + rank * 1e-4))
assert not differ(weight * (1 + rank * 1e-7 * noise))  # float32 has a precision of 1.2e-7
""")


def test_one_rank_prepares_the_data(tmp_path):
    prepare_data = "prepare_data = lambda: open('prepared', 'x')"  # fails if the file is there
    in_group(2, tmp_path, f"from filelock import FileLock\n{prepare_data}\n{block('prepare')}")


def test_all_ranks_stop_together(tmp_path):
    one_stops = block("one stops").replace("False  #", "stop  #")
    decision = block("decision").replace('os.path.exists("stop")', "rank == 0")
    program = f"""
device, trained = "cpu", 0
for stop, own in (False, 4 - rank), (rank == 1, 9):  # a rank without a batch, and one that wants to stop
    train_loader = [(1, 1)] * own
    {one_stops.replace(chr(10), chr(10) + "    ")}    trained += 10
for _ in range(3):  # rank 0 decides that all stop
    {decision.replace(chr(10), chr(10) + "    ")}
    trained += 100
print(f"{{trained}}\\n", end="")
"""
    assert in_group(2, tmp_path, program).split("\n")[:2] == ["30"] * 2

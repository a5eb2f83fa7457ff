"""common.py: the data, the transform, the network, printing and seeding."""

import builtins
import hashlib
import http.server
import pickle
import re
import shutil
import sys
import threading
import time
import traceback

import numpy as np
import torch
from conftest import SMALL, command, edited, fork, result, run
from torchvision.datasets import CIFAR10

import common


def load(url, md5, folder):
    """Load CIFAR-10 as the recipes do, but from another address and with other md5 sums."""
    CIFAR10.url, CIFAR10.tgz_md5, CIFAR10.meta["md5"] = url, md5["archive.tar.gz"], md5["batches.meta"]
    for file in CIFAR10.train_list + CIFAR10.test_list:
        file[1] = md5[file[0]]
    try:
        train, test = common.load_cifar10(folder, limit=30)
    except SystemExit as error:
        return error.code
    return [train.tensors[1].tolist(), test.tensors[1].tolist(), int(train.tensors[0].sum())]


def test_cifar10_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    files, archive = tmp_path / "server" / "cifar-10-batches-py", tmp_path / "archive.tar.gz"
    files.mkdir(parents=True)
    for name, *_ in [*CIFAR10.train_list, *CIFAR10.test_list, ["batches.meta"]]:
        images, labels = np.random.randint(0, 256, (20, 3072), np.uint8), [*range(10)] * 2
        (files / name).write_bytes(pickle.dumps(dict(data=images, labels=labels, label_names=[])))
    shutil.make_archive(tmp_path / "archive", "gztar", files.parent)
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in [archive, *files.iterdir()]}
    asked = []
    monkeypatch.chdir(tmp_path)  # serve this folder

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):  # called in each request
            asked.append(self.path)
            time.sleep(len(asked) == 1)  # meanwhile, the other processes need it too

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, folder = f"http://127.0.0.1:{server.server_port}/archive.tar.gz", tmp_path / "new" / "data"
    with fork.Pool(4) as pool:
        loaded = pool.starmap(load, [(url, md5, folder)] * 4, chunksize=1)
        assert loaded == [[labels + labels[:10], labels, loaded[0][2]]] * 4  # there are only 20 test images
        assert len(asked) == 2  # torchvision asks twice for one download: where it is, and for it
        archive.write_bytes(archive.read_bytes() + b"more")
        said = pool.apply(load, (url, md5, tmp_path / "other"))
    assert said.startswith("no data: File not found or corrupted.; put cifar-10-python.")
    assert not (tmp_path / "other" / "cifar-10-batches-py").exists()


def test_prepare_normalises_resizes_and_shifts_and_flips_each_image_on_its_own():
    # The same picture 500 times; its pixels hold their row and column. Each result must be one of 162 pictures.
    picture = np.stack(np.meshgrid(np.arange(20), np.arange(40), [0], indexing="ij"), 3)[:, :, 0].astype(np.uint8)
    pad = np.pad(picture, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    possible = {pad[y : y + 20, x : x + 40][:, ::i].tobytes() for y in range(9) for x in range(9) for i in (1, -1)}
    images = torch.from_numpy(picture).expand(500, 20, 40, 3)
    torch.manual_seed(0)
    shifted = common.shift_and_flip(images)
    seen = {image.numpy().tobytes() for image in shifted}
    assert len(possible) == 162 and seen <= possible and len(seen) > 140
    torch.manual_seed(0)
    augmented = common.prepare(images, 32, augment=True)
    assert augmented.shape == (500, 3, 32, 32) and torch.equal(augmented, common.prepare(shifted, 32))
    square, (mean, std) = images[:, :, :20], torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])
    torch.testing.assert_close(common.prepare(square, 20), ((square / 255 - mean) / std).permute(0, 3, 1, 2))


def test_only_the_main_process_prints_to_the_screen(capsys, monkeypatch):
    monkeypatch.setattr(builtins, "print", print)  # put back at the end
    common.setup_for_distributed(is_master=False)
    print("silent")
    print("silent", file=sys.stdout)
    print("forced", "too", sep=", ", force=True)
    traceback.print_exc()  # it calls print(..., file=sys.stderr)
    assert capsys.readouterr() == ("forced, too\n", "NoneType: None\n")


def test_a_data_set_that_augments_draws_other_numbers_in_each_process_and_epoch(tmp_path):
    augmenting = """
class Augmenting:  # its items are (tensor, int)
    def __len__(self): return 12
    def __getitem__(self, index):
        import random, numpy
        drawn = f"DRAWN {os.getpid()} {torch.rand(())} {numpy.random.rand()} {random.random()} "
        print(drawn, force=True, flush=True)
        return torch.full((8, 8, 3), index, dtype=torch.uint8), index % 10
def load_data(args):
    return Augmenting(), Augmenting()
def never_called(args):
"""
    folder = edited(tmp_path / "project", "ddp_launch_train", ("\ndef load_data(args):\n", augmenting))
    finished = run(command("ddp_launch_train", *SMALL, "--epochs=2", "--workers=1", "--device=cpu", folder=folder))
    assert result(finished)["world_size"] == 2
    columns = zip(*re.findall(r"DRAWN (\S+) (\S+) (\S+) (\S+)", finished.stdout), strict=True)
    # Each of the two processes has one that loads for training, and one for validation. Each draws in 12 items.
    assert [len(set(column)) for column in columns] == [4, 48, 48, 48]

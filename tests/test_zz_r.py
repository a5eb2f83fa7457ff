from conftest import *
from test_recipes import TINY, CPU
def test_p(tmp_path):
    for s in SCRIPTS:
        print(s, [x for x in run(command(s, *(TINY if "apex" in s else CPU), "--epochs", "3")).stdout.splitlines() if "train_loss" in x and "RES" not in x])
    assert 0

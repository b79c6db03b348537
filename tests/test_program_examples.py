"""The examples of other programs run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "programs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PYTHON = [sys.executable]


@pytest.mark.combination
@pytest.mark.parametrize(
    ("launcher", "script", "shows"),
    [
        (PYTHON, "lightning_trainer.py", "step 15: loss"),
        ([*PYTHON], "lightning_trainer.py --strategy ddp", "step 15: loss"),
        (TORCHRUN, "accelerate_loop.py", "batch 15: loss"),
        (TORCHRUN, "hf_trainer.py", "train_loss"),
        (TORCHRUN, "peft_lora.py", "merged: "),
        (PYTHON, "torchtitan_config.py", ""),
    ],
    ids=["lightning", "lightning-ddp", "accelerate", "transformers", "peft", "torchtitan"],
)
def test_scripts(launcher, script, shows):
    name, *options = script.split()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*launcher, str(FOLDER / name), *options],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert shows in done.stdout + done.stderr

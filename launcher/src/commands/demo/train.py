"""The job of `ckpt-run demo` where there is PyTorch: trains a small model, and logs the loss of each step.

Usage: train.py LOG END STEPS WAIT_AFTER. After step WAIT_AFTER, it waits until the file END exists.
"""

import os
import sys
import time

import torch

log, end, steps, wait_after = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with open(log, "a", buffering=1) as out:
    for step in range(1, steps + 1):
        # The state of the random generator is in memory only: another one after the resume would change the losses.
        batch = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.write(f"{step} {loss.item().hex()}\n")
        time.sleep(0.05)
        while step == wait_after and not os.path.exists(end):
            time.sleep(0.02)

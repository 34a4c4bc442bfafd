"""Habits of training programs."""

import json
import os
import random
import shutil

from habit import Habit, equal, names, pause, read, write


class torch_save(Habit):
    """torch.save of a model to the same path in each step."""

    def begin(self):
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        torch.manual_seed(3)
        self.model = torch.nn.Linear(60, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, n):
        loss = self.model(self.torch.full((1, 60), 1 / (n + 1))).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.save({"step": n, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        pause()

    def save(self, state):
        self.torch.save(state, self.path("model.pt"))

    def check(self, n):
        if n:
            state = self.torch.load(self.path("model.pt"))
            equal(state["step"], n - 1, "the step")
            right = all(self.torch.equal(state["model"][key], now) for key, now in self.model.state_dict().items())
            equal(right, True, "the saved model is right")


class torch_save_rename(torch_save):
    """torch.save to another name, then rename."""

    def save(self, state):
        self.torch.save(state, self.path("model.pt.tmp"))
        pause()
        os.rename(self.path("model.pt.tmp"), self.path("model.pt"))


class trainer_checkpoints(Habit):
    """Checkpoint directories as of Hugging Face's Trainer: a temporary directory that is renamed, a symbolic link to the
    newest, the oldest deleted, a state that is rewritten."""

    KEEP = 2

    def begin(self):
        self.random_state = random.Random(1)
        self.history = []

    def step(self, n):
        self.history.append(self.random_state.random())
        if n % 4 == 3:
            self.save(n + 1)
        write(self.path("trainer_state.json"), json.dumps({"step": n, "log": self.history[-5:]}).encode())

    def save(self, number):
        temporary, final = self.path(f"tmp-checkpoint-{number}"), self.path(f"checkpoint-{number}")
        os.mkdir(temporary)
        write(os.path.join(temporary, "model.bin"), self.block(number, 30_000))
        write(os.path.join(temporary, "trainer_state.json"), json.dumps(self.history).encode())
        os.rename(temporary, final)
        pause()
        if os.path.lexists(self.path("latest")):
            os.unlink(self.path("latest"))
        os.symlink(f"checkpoint-{number}", self.path("latest"))
        pause()
        old = self.path(f"checkpoint-{number - 4 * self.KEEP}")
        if os.path.isdir(old):
            shutil.rmtree(old)

    def check(self, n):
        newest = n // 4 * 4
        saved = [number for number in (newest - 4, newest) if number > 0]
        want = {f"checkpoint-{number}" for number in saved} | ({"latest"} if saved else set())
        equal(set(names(self.dir)), want | ({"trainer_state.json"} if n else set()), "names")
        for number in saved:
            model = read(self.path(f"checkpoint-{number}/model.bin"))
            equal(model == self.block(number, 30_000), True, f"model {number} is right")
            state = json.loads(read(self.path(f"checkpoint-{number}/trainer_state.json")))
            equal(state, self.history[:number], f"history {number}")
        if saved:
            equal(os.readlink(self.path("latest")), f"checkpoint-{newest}", "the newest")
        if n:
            state = json.loads(read(self.path("trainer_state.json")))
            equal(state, {"step": n - 1, "log": self.history[-5:]}, "the state")


class best_model(Habit):
    """A best model that is copied from the newest one when it is better, and metrics that are rewritten."""

    def begin(self):
        self.best, self.best_step = 0.0, None

    def step(self, n):
        score = self.random(n).random()
        write(self.path("last.bin"), self.block(n, 5000))
        if score > self.best:
            self.best, self.best_step = score, n
            pause()
            shutil.copyfile(self.path("last.bin"), self.path("best.bin"))
        write(self.path("metrics.json"), json.dumps({"best": self.best, "at": self.best_step}).encode())

    def check(self, n):
        if n:
            equal(read(self.path("last.bin")) == self.block(n - 1, 5000), True, "the last model is right")
            right = read(self.path("best.bin")) == self.block(self.best_step, 5000)
            equal(right, True, "the best model is right")
            equal(json.loads(read(self.path("metrics.json")))["best"], self.best, "the best score")


class epochs(Habit):
    """A checkpoint of 30 MB for each step, written to `ckpt.tmp` and renamed. All bytes of one checkpoint have one value."""

    BYTES = 30 << 20

    def step(self, n):
        part = bytes([n % 251]) * (1 << 20)
        with open(self.path("ckpt.tmp"), "wb", buffering=0) as file:
            for _ in range(self.BYTES >> 20):
                file.write(part)
                pause()
        os.rename(self.path("ckpt.tmp"), self.path("ckpt"))

    def check(self, n):
        if n:
            values = {bytes(set(part)) for part in self.parts()}
            equal(values, {bytes([(n - 1) % 251])}, "the values in the checkpoint")

    def parts(self):
        with open(self.path("ckpt"), "rb") as file:
            while part := file.read(1 << 20):
                yield part

"""When a training with -o resumes and saves. run_folder.py does it."""
from dev.features.checkpoints.checkpoint_files import FILES
from dev.features.checkpoints.main_log import Logged
from dev.features.checkpoints.resume import check_batch
from dev.features.feature import Feature, Flag, trains


class Resumed:
    """A run that starts from its folder's checkpoint, if there is one."""

    def find_model(self):
        return str(self.folder.checkpoint or "") or super().find_model()


class Kept(Resumed):
    """Training that keeps checkpoints in a folder."""

    def weights(self, model):
        """{name of a file: (views of whole parameters, their type)}, which rank 0 writes into each
        checkpoint. A feature may add to them, and declares the first words of their names as
        saved."""
        return {FILES["model"]: (model.params, model.device.real)}

    def open_data(self):
        check_batch(self.folder, self)
        super().open_data()

    def make_model(self):
        model = super().make_model()
        self.folder.begin(self, model)
        return model

    def train(self):
        try:
            super().train()
        finally:
            self.folder.close()

    def validates(self, done):
        return super().validates(done) and not self.folder.ended

    def samples(self, done):
        return super().samples(done) and not self.folder.ended

    def next_batches(self):
        position = self.train_data.position()
        batches = super().next_batches()
        batches.position = position
        return batches

    def saves(self, done):
        return super().saves(done) or done > 0 and self.due(done, self.flags.checkpoint_every)

    def save(self, done, batches):
        if self.model.step != self.folder.step:  # more than -x if a finished run is resumed
            whole = self.flags.checkpoint_every or self.stopping
            self.folder.save(self, batches.position, whole)

    def give_up(self, queued, verdict):
        self.model.step = queued.number - 1  # no later one has made an update
        self.folder.save(self, queued.batches.position, whole=True, prunes=False)
        super().give_up(queued, verdict)

    def what_is_left(self):
        return "-y 1 goes on from there"


GROUP = "checkpoints and resuming"
KEPT = Feature(
    "runs", lambda flags, ranks: flags.output and trains(flags), training=Kept,
    observer=Logged,
    saved=("model", "state", "run", "DONE"), flags=(
        Flag("-o", "--output", "name", None, "new folder for main.log and checkpoints; the last "
             "step is always saved (default: none)", replayed=False, may_differ=True),
        Flag("-n", "--checkpoint-every", "count or 0", 0, "steps between checkpoints that -y 1 can "
             "resume; 0: none", GROUP, needs="output", may_differ=True),
        Flag("-nk", "--checkpoints-kept", "count or 0", 0, "keep the N newest checkpoints; 0: all",
             GROUP, needs="checkpoint_every", may_differ=True),
        Flag("-nm", "--checkpoints-major", "count or 0", 0, "also keep those of every M-th step; "
             "0: none", GROUP, needs="checkpoints_kept", may_differ=True),
        Flag("-y", "--resume", "switch", 0, "1: resume the run in -o, from its newest complete "
             "checkpoint or its start", GROUP, needs="output", may_differ=True)))
RESUMED = Feature("checkpoint", lambda flags, ranks: flags.output and flags.sample is not None
                  and not flags.dry_run, training=Resumed)

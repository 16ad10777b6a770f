"""Queue each step before the last one is reported, so that the GPU need not wait for the host."""
import time

from dev.features.checkpoints.background_writer import host_memory
from dev.features.feature import Feature, is_fast
from train_gpt2 import Verdict


class Fetching:
    """A mixin in front of FastCuda."""

    def fetch(self, array):
        """Queue a copy to the host, and return a function that waits for it and returns it."""
        stream = self.cupy.cuda.get_current_stream()
        host = host_memory(self, array.nbytes).view(array.dtype).reshape(array.shape)
        array.get(stream=stream, out=host, blocking=False)
        copied = stream.record()

        def wait():
            copied.synchronize()
            return host

        return wait


class LateReports:
    """Training that reports a step when the next one is queued."""
    late = None  # (the step to report, a wait() for its verdict)
    reported = 0.0  # when the last report was

    def finish(self, queued):
        wait = self.device.fetch(self.model.adam.verdict)  # before a report uses the device
        self.report_late()
        self.late = queued, wait

    def report_late(self):
        if self.late:
            (queued, wait), self.late = self.late, None
            verdict = Verdict(*wait().tolist())
            queued.begun = max(queued.begun, self.reported)  # it waited its turn
            self.reported = time.perf_counter()
            self.report(queued, verdict)

    def pause(self, done, batches):
        if self.pauses(done):
            self.report_late()
        super().pause(done, batches)

    def pauses(self, done):
        """Whether we validate, sample or save next."""
        return self.validates(done) or self.samples(done) or self.saves(done)


FEATURE = Feature("late reports", lambda flags, ranks: is_fast(flags), training=LateReports,
                  device=Fetching, chapter="late reports")

"""Jobs in Slurm's queue, by submitit: each starts from its folder, and leaves there what came of it.

submitit writes the batch file and takes the keys that its users know. Whether a job is still there says ``squeue``,
which Slurm has without accounts too, and which is asked for all jobs at once. A controller that doesn't answer says
nothing: until it does, a job is over only where it has left its exit code.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.errors import ConfigError, words_of
from offstage.pipeline.sweeps.job_run import PreparedJob, queued_command
from offstage.pipeline.sweeps.progress import SweepProgress

_POLL_SECONDS = 1.0
_ENDING_SECONDS = 15.0
"""How long jobs have to end after they were told to."""
_ABSENT_SECONDS = 30.0
"""How long a queue that answers hasn't known a job that is lost: its exit code may be on its way from a node."""

_ANY_QUEUE = frozenset(
    {"name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "stderr_to_stdout"}
)
"""The keys that submitit has for any queue; those of Slurm's alone it knows by a prefix."""
_FIRST_PORT, _PORTS = 20000, 10000
"""Where the first task of a job may listen for the others: below the ports that the system gives to anyone."""


@dataclass(frozen=True, slots=True)
class QueuedCommand:
    """What submitit calls on a node: the ``command`` of a job. One that is queued again does the same once more."""

    command: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command and return its exit code. Where a job has several tasks, each is a host of its run."""
        return subprocess.call(self.command, env={**os.environ, **host_variables(os.environ)})

    def checkpoint(self) -> Any:
        """Return what is to be queued again; submitit asks when a job's time is over, or its node is wanted."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def host_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the tasks of a job find each other, as torchrun names them; none for one task.

    The port follows from the job's number: jobs that share a node have others.
    """
    tasks = int(environment.get("SLURM_NTASKS", "1"))
    if tasks < 2:
        return {}
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks // int(environment["SLURM_JOB_NUM_NODES"])),
        "MASTER_ADDR": environment["SLURM_LAUNCH_NODE_IPADDR"],
        "MASTER_PORT": str(_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS),
    }


class SlurmQueue:
    """Which jobs the queue still knows, asked once a round; ``absent_seconds`` is when one is lost that it doesn't."""

    def __init__(self, absent_seconds: float = _ABSENT_SECONDS) -> None:
        self._patience = absent_seconds
        self._known: frozenset[str] | None = None
        self._absent_since: dict[str, float] = {}

    def ask(self) -> None:
        """Ask for all jobs of this user. No answer is none: nothing is known then."""
        command = ["squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            self._known = None
            return
        self._known = frozenset(done.stdout.split()) if done.returncode == 0 else None

    def knows(self, job: str) -> bool:
        """Return whether the queue knows the job, as far as it told."""
        return self._known is not None and job in self._known

    def has_lost(self, job: str) -> bool:
        """Return whether the queue hasn't known the job for a while, in answers without a gap."""
        if self._known is None or job in self._known:
            self._absent_since.pop(job, None)
            return False
        since = self._absent_since.setdefault(job, time.monotonic())
        return time.monotonic() - since >= self._patience


class SlurmJobs:
    """Runs jobs in the queue, as ``keys``, those of ``hydra.launcher``, say.

    Raises:
        ConfigError: there is no submitit, or no Slurm.
    """

    def __init__(self, keys: DictConfig) -> None:
        if find_spec("submitit") is None:
            raise ConfigError(
                "hydra/launcher=submitit_slurm: submitit isn't installed; pip install 'offstage-pipeline[slurm]'"
            )
        absent = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
        if absent:
            raise ConfigError(
                f"hydra/launcher=submitit_slurm: there is no {absent[0]} here to submit jobs with; run it where "
                "Slurm's commands are, or give hydra/launcher=local"
            )
        self._keys = keys
        self._queue = SlurmQueue()

    def run(
        self, jobs: Sequence[PreparedJob], progress: SweepProgress, ended: Callable[[PreparedJob, int | None], None]
    ) -> None:
        """Queue ``jobs``, and say of each how it ended, once it has."""
        self._refuse_several_tasks(jobs)
        waiting = self._submit(jobs)
        progress.begin([job.known.number for job in jobs])
        try:
            while waiting:
                self._queue.ask()
                for number in [number for number, (job, _) in waiting.items() if self._is_over(number, job)]:
                    job, _ = waiting.pop(number)
                    ended(job, job.exit_code())
                if waiting:
                    time.sleep(_POLL_SECONDS)
                    progress.refresh()
        except KeyboardInterrupt:
            self._end({number: queued for number, (_, queued) in waiting.items()})
            raise

    def _submit(self, jobs: Sequence[PreparedJob]) -> dict[str, tuple[PreparedJob, Any]]:
        """Return the jobs by their numbers in the queue, each with what submitit knows of it."""
        commands = [tuple(queued_command(job)) for job in jobs]
        executor = self._executor()
        try:
            with _no_interrupts(), executor.batch():
                queued = [executor.submit(QueuedCommand(command)) for command in commands]
        except (RuntimeError, subprocess.SubprocessError) as error:  # what submitit makes of sbatch's refusals
            raise ConfigError(f"hydra.launcher: Slurm took no job: {words_of(error)}") from error
        with suppress(OSError):
            self._folder().rmdir()  # submitit makes a folder of that name, %j and all
        return {str(each.job_id): (job, each) for job, each in zip(jobs, queued, strict=True)}

    def _refuse_several_tasks(self, jobs: Sequence[PreparedJob]) -> None:
        """Refuse several tasks for a job that is one process: each of them would do all of it."""
        tasks = self._keys.nodes * self._keys.tasks_per_node
        alone = [job.known.number for job in jobs if (job.config.get("hardware") or {}).get("hosts") is None]
        if tasks > 1 and alone:
            raise ConfigError(
                f"hydra.launcher.nodes: {tasks} tasks for job {alone[0]}, which runs on one host; give "
                "hardware.hosts=auto for a model that is divided among them, or one node"
            )

    def _folder(self) -> Path:
        """Return where submitit keeps what is its own; ``%j``, the number of a job, is filled in by it.

        What lies there as a job's number is a pickle that the job loads, so that nothing may lie there yet.
        """
        given = Path(self._keys.submitit_folder)
        if not given.parent.exists():
            return given
        return next(name for number in count(1) if not (name := given.parent / f"resumed-{number}").exists()) / "%j"

    def _executor(self) -> Any:
        """Return submitit's executor, with the parameters that ``hydra.launcher`` gives."""
        import submitit

        logging.getLogger("submitit").setLevel(logging.ERROR)  # without accounts Slurm warns at every look
        given = OmegaConf.to_container(self._keys, resolve=True)
        assert isinstance(given, dict)
        retries = given.pop("max_num_timeout")
        # -P keeps the current folder out of the import path: it may hold a folder named numpy.
        python = f"{shlex.quote(sys.executable)} -P"
        executor = submitit.AutoExecutor(
            cluster="slurm", folder=self._folder(), slurm_max_num_timeout=retries, slurm_python=python
        )
        named = {str(name): value for name, value in given.items() if name not in ("_target_", "submitit_folder")}
        try:
            executor.update_parameters(
                **{name if name in _ANY_QUEUE else f"slurm_{name}": value for name, value in named.items()}
            )
        except (AssertionError, NameError, TypeError, ValueError) as error:  # a key that it hasn't, or of another type
            raise ConfigError(f"hydra.launcher: submitit takes no such keys: {words_of(error)}") from error
        return executor

    def _is_over(self, number: str, job: PreparedJob) -> bool:
        """Return whether a job has ended, and isn't about to begin again, or was lost on the way."""
        return self._queue.has_lost(number) if job.exit_code() is None else not self._queue.knows(number)

    def _end(self, jobs: Mapping[str, Any]) -> None:
        """Have every job that still runs end, and wait until its record says so."""
        for queued in jobs.values():
            queued.cancel(check=False)
        deadline, left = time.monotonic() + _ENDING_SECONDS, list(jobs)
        while time.monotonic() < deadline and left:
            time.sleep(_POLL_SECONDS / 10)
            self._queue.ask()
            left = [number for number in left if self._queue.knows(number)]


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Have a terminal's Ctrl-C reach neither this process nor sbatch, until it is known which jobs there are."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

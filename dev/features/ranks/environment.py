"""The environment variables in which launchers tell a process its rank."""
import os

# For each launcher: a variable that only its processes have; then those for the rank, the number of
# ranks, the rank on this machine, and the number of ranks on it ("" if it does not say). The first
# launcher found counts: srun may set PMI's variables too, but not the rank on a machine.
OMPI = "OMPI_COMM_WORLD_"
LAUNCHERS = {
    "torchrun or --gpus": ("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (f"{OMPI}RANK", f"{OMPI}RANK", f"{OMPI}SIZE", f"{OMPI}LOCAL_RANK",
                 f"{OMPI}LOCAL_SIZE"),
    "MPICH or Intel MPI": ("MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                           "MPI_LOCALNRANKS"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "Slurm": ("SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    "PMI": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}


def launched(environment=os.environ):
    """(launcher, rank, ranks, rank on this machine, ranks on it), or None for a single process."""
    for name, (mark, *variables) in LAUNCHERS.items():
        if environment.get(mark, "").isdigit():
            values = [int(environment.get(variable, default))
                      for variable, default in zip(variables, (0, 1, 0, 1))]
            return (name, *values) if values[1] > 1 else None
    return None

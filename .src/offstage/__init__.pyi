from offstage.pipeline.errors import (
    BudgetError as BudgetError,
    BusyError as BusyError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DisagreementError as DisagreementError,
    KilledError as KilledError,
    OffstageError as OffstageError,
    ReplayError as ReplayError,
    StorageError as StorageError,
)
from offstage.stages.dispatch import *
from offstage.stages.empty_init import *
from offstage.stages.finetune import *
from offstage.stages.plan import *
from offstage.stages.shard_load import *

__version__: str

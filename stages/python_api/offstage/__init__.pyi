from stages.dispatch import *
from stages.empty_init import *
from stages.finetune import *
from stages.plan import *
from stages.shard_load import *

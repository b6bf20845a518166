"""``python -m offstage`` is the command ``offstage``: so ``torchrun … -m offstage …`` starts it on several hosts."""

from offstage.pipeline.commands import offstage

if __name__ == "__main__":
    offstage()

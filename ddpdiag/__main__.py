"""Entry point of `python -m ddpdiag` and of `torchrun -m ddpdiag`."""

from ddpdiag.cli import main

if __name__ == "__main__":
    main()

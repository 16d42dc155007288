"""`python -m ddpdiag`, and `torchrun -m ddpdiag`."""

from ddpdiag.cli import main

if __name__ == "__main__":
    main()

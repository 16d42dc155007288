"""`ddpdiag watch`: start a training unchanged, and when it goes silent say which rank holds it up."""

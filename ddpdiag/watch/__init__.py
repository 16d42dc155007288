"""`ddpdiag watch`: start a training unchanged, and when it goes silent report which rank holds it up."""

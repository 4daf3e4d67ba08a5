"""Training drafters on the target that will verify them."""

"""Privacy: what a site discloses besides its model, and masked sums."""

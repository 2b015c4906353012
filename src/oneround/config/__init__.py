"""The experiment as data: the recipe, its sections, how it is loaded, and the parts that fill its slots."""

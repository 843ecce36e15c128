"""A task as devices receive it: the manifest of its graphs, and the format of its data."""

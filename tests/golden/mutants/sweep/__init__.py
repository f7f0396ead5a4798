"""A sweep of general mutants over some rooms of the package: what the tests let through, and how much they catch.

The other mutants of this folder are wrong implementations that somebody thought of. These are made by the operators of
cosmic-ray, from every `+`, `<`, `True` and `if`, and a seeded sample of them is judged: first by the data cases of the
corpus, then by the room's unit tests, then by the http cases, up to the first that fails. Modules: `filters`
(what is left out), `mutations` (how the sample is drawn), `workers` and `forkserver` (how a mutant runs), `survivors`
(how one is explained), `score`.
"""

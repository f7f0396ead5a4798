"""The embedded backend: a small real language model in torch that speaks SGLang's chat API.

torch and transformers are imported by `model`, `generation`, `service` and `proof` only; `task`, `policy`, `speech`,
`prefix_cache`, `protocol` and `command` import neither.
"""

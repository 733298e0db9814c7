"""Runs inside vLLM's environment: documents in, files of hidden states out. Imports vLLM and nothing of ours.

python states_child.py JOB.json REPLY_FD

One JSON list of token id lists a line on stdin is answered by one JSON list of files a line on REPLY_FD (stdout is
vLLM's). A file holds `hidden_states` [T, S, H], which vLLM's `extract_hidden_states` method has put into a KV cache
and its connector wrote; the reader deletes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from typing import Any


def make_llm(job: dict[str, Any]) -> Any:
    from vllm.platforms import current_platform

    import vllm

    cpu = current_platform.is_cpu()
    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if cpu:  # lies beside this file
        connector = {"kv_connector": "HostStatesConnector", "kv_connector_module_path": "host_states_connector"}
    settings = {
        "dtype": job["dtype"],
        "max_model_len": job["max_length"] + 1,  # a request makes a token
        "enable_prefix_caching": False,
        "enforce_eager": cpu,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        "kv_transfer_config": connector
        | {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": job["folder"]}},
    }
    return vllm.LLM(job["model"], **(settings | job["arguments"]))


def main() -> None:
    import vllm

    with open(sys.argv[1]) as file:
        job = json.load(file)
    replies = os.fdopen(int(sys.argv[2]), "w")
    llm = make_llm(job)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    replies.write(json.dumps("ready") + "\n")
    replies.flush()
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        files = []
        for output in llm.generate(prompts, params, use_tqdm=False):
            path = output.kv_transfer_params["hidden_states_path"]
            with open(path + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # until the connector's thread has written the file
            os.remove(path + ".lock")
            files.append(path)
        replies.write(json.dumps(files) + "\n")
        replies.flush()


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()

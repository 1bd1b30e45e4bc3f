# SPDX-License-Identifier: Apache-2.0
"""Cells for a notebook: `Omni` finds the server of this machine, or starts one and ends it with `close()`."""

# %%
from triton_omni import Omni

omni = Omni("chat")

# %%
print(omni.chat("What is the capital of France?", max_tokens=20))

# %%
omni.speak("Hello there.").save("hello.wav")  # alone at the end of a cell: a player

# %%
omni.close()

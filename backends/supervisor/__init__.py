# SPDX-License-Identifier: Apache-2.0
"""What runs outside Triton: set-up, the launcher, and what brings dead processes back. Read in this order:

set-up   setup → steps, each done once (stamps), by children (child, pip); selfcheck at its end
serve    serve → launch (one tritonserver: locate, rundir, processes) → supervise, which does what watch decides
asking   doctor and `health` look at running servers; served gives demo, self-check and tests one of their own
words    home (set-up's folders), problem (what went wrong, and the way out)
"""

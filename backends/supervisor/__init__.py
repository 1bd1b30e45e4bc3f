# SPDX-License-Identifier: Apache-2.0
"""Everything that runs outside Triton: set-up, the launcher and the supervisor of a running server.

bootstrap    runs a module of a checkout before anything is installed
interpreter  switches to the engine environment's Python and checks that it runs the same code
setup/       `make setup`: steps, each done once (stamps), run as child processes (child, pip); self_check at the end
serve/       `triton-omni serve`: command → launch (one tritonserver: locate, run_folder, processes) → supervise, which
             carries out what watch decides; temporary starts one for demo, self-check and tests
doctor, demo the commands of the same names
home, errors folders of set-up; SetupError
"""

# SPDX-License-Identifier: Apache-2.0
"""What several tests and scripts use: engine processes, a tiny model, stand-ins for devices and servers."""

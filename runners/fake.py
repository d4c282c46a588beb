# /// script
# requires-python = ">=3.10"
# dependencies = []
#
# [tool.harness]
# summary = "a stack of known truth; runs nothing, for tests and for learning the harness"
#
# [tool.harness.env.cpu]
# device = "cpu"
#
# [tool.harness.options.quant]
# type = "string"
# default = "f16"
# choices = ["f16", "q8_0", "q4_0"]
# help = "a name only"
# ///

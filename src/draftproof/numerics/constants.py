"""Each constant of the pinned arithmetic, once. The decimals are exact float32 values, shortest form."""

LOG2E = 1.4426950216293335
LN2 = 0.6931471824645996
FLT_MAX = 3.4028234663852886e38

# 2**r = 1 + r * (c1 + r * (c2 + ...)), |r| <= 1/2: minimax in relative error, then rounded to float32.
EXP2 = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)
# log(1 + f) = f * (c0 + f * (c1 + ...)), -1/4 <= f <= 1/2.
LOG1P = (
    1.0,
    -0.5000006556510925,
    0.3333359360694885,
    -0.2499321848154068,
    0.1997591257095337,
    -0.16824312508106232,
    0.1499449908733368,
    -0.12076719105243683,
    0.05411171168088913,
)
# log2(1 + f) = f * (c0 + f * (c1 + ...)), -1/4 <= f <= 1/2.
LOG2 = (
    1.4426950216293335,
    -0.7213484644889832,
    0.4809020757675171,
    -0.36057591438293457,
    0.2881914973258972,
    -0.2427235245704651,
    0.21632489562034607,
    -0.17423023283481598,
    0.07806669920682907,
)

# Weights below 2**-40 of the largest are zero; a mass is the weight in units of 2**-40.
MIN_EXPONENT = -40
MASS_ONE = 1 << 40
# W <= 2**62, so that the limb products of the inverse CDF stay inside int64.
MAX_VOCAB = 1 << 22
# top_p is held in units of 2**-30; logits that are logarithms of decimals round by up to 2**-21 of the mass.
TOP_P_BITS = 30
TOP_P_SLACK_BITS = 21

MIN_UNIFORM_STEP = 2.0**-32
MAX_UNIFORM = 1.0 - 2.0**-24
RESIDUAL_ONE = 2.0**61

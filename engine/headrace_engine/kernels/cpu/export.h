// How the libraries' functions are declared: C names, the only ones that are visible outside.
#pragma once

#include <cstdint>

#define HEADRACE_EXPORT extern "C" __attribute__((visibility("default")))

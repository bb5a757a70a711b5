#include "tests/check.h"

int main() { return mirage::tests::run_tests(); }

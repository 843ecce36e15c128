/** Lint of the operator's page: mistakes, and every way in which text could become HTML. */

import js from "@eslint/js";
import globals from "globals";

const asText = "What devices send is text: use make(), setText() or textContent.";
const html = ["innerHTML", "outerHTML", "insertAdjacentHTML", "srcdoc"];

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "max-lines": ["error", { max: 320, skipBlankLines: true, skipComments: true }],
      "no-console": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-restricted-properties": [
        "error",
        ...html.map((property) => ({ property, message: asText })),
        ...["write", "writeln"].map((property) => ({
          object: "document",
          property,
          message: asText,
        })),
      ],
      "no-restricted-syntax": [
        "error",
        {
          selector: "CallExpression[callee.property.name='setAttribute'][arguments.0.value='style']",
          message: "The page's policy (CSP) forbids style attributes: set element.style.",
        },
      ],
      "no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
];

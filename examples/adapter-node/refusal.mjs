/** A deterministic refusal: 422 for assembly, "refused" for the codec. */
export class Refusal extends Error {}
